"""The ranker's proposal: of many points that are new and fit, the one that is expected to add most to the front.

After the ranked-pair predictor of arXiv 2311.07870 and the predictor ensemble of BANANAS (arXiv 1910.11858):
rankers learn from pairs of candidates (`ensemble`), their scores are read as NE (`calibration`), and the gain is
what the front is expected to grow by (`acquisition`). Candidates that still train stand on the front with the NE
that is expected of them, so that no similar one is proposed beside them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from search.pareto import log_flops
from search.samplers.context import SamplerContext
from search.samplers.draw import DrawnPoint, evenly, near
from search.samplers.ranker.acquisition import Corner, expected_gain
from search.samplers.ranker.calibration import predict_ne
from search.samplers.ranker.features import Description, Encoder, KeptDescription, describe
from search.samplers.ranker.latency import likely_in_time
from search.samplers.ranker.pairs import final_ne, has_shown
from search.samplers.static_cost import CandidatePricer
from spaces.space import Point
from trials.record import TrialRecord

STARTUP = 12
"""Number of candidates with an NE at their end from which on the rankers are asked; before, points are random.
Four and six are worse on a surrogate, eight is no better (docs/log.md)."""
STARTUP_DRAWS = 20
"""Number of random points of which one is taken before that, the first expected to meet serving.max_ms: an
assumption, not measured apart."""
EVENLY = 120
"""Number of points drawn from the whole space for a proposal: an assumption, not measured apart."""
NEAR = 180
"""Number of points drawn near good candidates for a proposal: an assumption, not measured apart."""
MOST_TRIED = EVENLY + NEAR + 100
"""Number of points that are planned for a proposal at most: an assumption, not measured apart."""
PLANNING_SECONDS = 10.0
"""Seconds after which no further point is planned for a proposal: an assumption. A plan for a log of thousands of
columns takes a fifth of a second."""
BEST = 4
"""Number of candidates of lowest NE near which points are drawn, beside those on the front: an assumption, not
measured apart."""
WORST = 0.75
"""Quantile of the first candidates' NE up to which the front's area counts: an assumption, not measured apart."""


@dataclass(frozen=True, slots=True)
class KnownPoint:
    """A point that was proposed, and what is known of it without training; of its network the description alone
    stays, since there may be thousands."""

    point: Point
    fingerprint: str
    """Fingerprint of the network and the training settings that the space decides."""
    log_flops: float
    """Log FLOPs of the candidate, the front's first axis."""
    kept: KeptDescription

    @property
    def description(self) -> Description:
        """The candidate in numbers."""
        return self.kept.whole()


@dataclass(frozen=True)
class Observations:
    """What is known of a study; candidates with the same network and training share a result and count once."""

    taken: set[str] = field(default_factory=set)
    """Fingerprints of all candidates that were proposed."""
    shown: list[KnownPoint] = field(default_factory=list)
    """Candidates with an NE, or with a curve that has begun."""
    records: list[TrialRecord] = field(default_factory=list)
    """The records of `shown`, in its order."""
    pending: list[KnownPoint] = field(default_factory=list)
    """Candidates that have not ended."""
    timed: list[tuple[KnownPoint, float]] = field(default_factory=list)
    """Candidates that have ended, with their forward time in milliseconds, where it was measured."""

    @property
    def finished(self) -> list[tuple[KnownPoint, float]]:
        """Candidates with an NE at their end, and that NE."""
        pairs = ((known, final_ne(record)) for known, record in zip(self.shown, self.records, strict=True))
        return [(known, ne) for known, ne in pairs if ne is not None and math.isfinite(ne)]


def propose(context: SamplerContext, seed: int) -> Point:
    """The proposed point, which follows from the seed and what is known of the study."""
    observations, rng, pricer = observations_of(context), random.Random(seed), context.pricer
    anywhere = evenly(pricer, observations.taken, rng, context.fixed)
    max_ms = pricer.limits.serving.max_ms
    timed = [(known.description, ms) for known, ms in observations.timed] if max_ms else []
    if len(observations.finished) < STARTUP:
        in_time = likely_in_time(timed, list(islice(anywhere, STARTUP_DRAWS if max_ms else 0)), max_ms)
        return _first_that_fits(chain(in_time, anywhere), pricer, rng)
    pool = list(islice(anywhere, EVENLY))
    pool += islice(near(pricer, _good(observations), observations.taken, rng, context.fixed), NEAR)
    pool = likely_in_time(timed, pool, max_ms) or pool
    order = np.argsort(-_gains(observations, pool, seed), kind="stable")
    return _first_that_fits(chain((pool[index] for index in order), anywhere), pricer, rng)


def observations_of(context: SamplerContext) -> Observations:
    """What is known of a study, in the order of its trials."""
    observations = Observations()
    for number in sorted(context.points):
        known, record = _known(context, number), context.records.get(number)
        if known is None or known.fingerprint in observations.taken:
            continue
        observations.taken.add(known.fingerprint)
        if record is not None and has_shown(record):
            observations.shown.append(known)
            observations.records.append(record)
        if context.unfinished(number):
            observations.pending.append(known)
        elif record is not None and record.plan.serving_ms is not None:
            observations.timed.append((known, record.plan.serving_ms))
    return observations


def _known(context: SamplerContext, number: int) -> KnownPoint | None:
    """What is known of the proposal with this number, worked out once; None where its point gives no model."""
    if number not in context.kept:
        point = context.points[number]
        priced = context.pricer.price(point)
        context.kept[number] = priced and KnownPoint(
            point, priced.fingerprint, log_flops(priced.flops), KeptDescription(describe(priced))
        )
    known: KnownPoint | None = context.kept[number]
    return known


def _first_that_fits(drawn: Iterable[DrawnPoint], pricer: CandidatePricer, rng: random.Random) -> Point:
    """The first drawn point that fits. Where none of many does, the first of all, which the plan then refuses or
    which takes long; where nothing new is drawn, any point: the study counts how often that happens, and ends."""
    first, began = None, time.monotonic()
    # where an axis is a range new points never end, and of one architecture, which is tuned, none may fit
    for drawn_point in islice(drawn, MOST_TRIED):
        first = first or drawn_point
        if pricer.fits(drawn_point.priced.candidate):
            return drawn_point.point
        if time.monotonic() - began > PLANNING_SECONDS:
            break
    return pricer.space.random_point(rng) if first is None else first.point


def _good(observations: Observations) -> list[Point]:
    """Points of the candidates on the front, and of those of lowest NE."""
    by_ne = sorted(observations.finished, key=lambda pair: pair[1])
    front, least = [], math.inf
    for known, _ne in by_ne:
        if known.log_flops < least:
            least = known.log_flops
            front.append(known.point)
    return front + [known.point for known, _ in by_ne[:BEST]]


def _gains(observations: Observations, pool: list[DrawnPoint], seed: int) -> np.ndarray:
    """Expected gains gain_P of the points in the pool."""
    known = [*observations.shown, *observations.pending]
    described = [each.description for each in known]
    described += [describe(drawn.priced) for drawn in pool]
    prediction = predict_ne(
        Encoder(described).matrix(described), observations.records, np.random.default_rng(seed)
    )
    front: list[Corner] = [(each.log_flops, ne) for each, ne in observations.finished]
    first, end = len(observations.shown), len(observations.shown) + len(observations.pending)
    flops_N = np.array([*(each.log_flops for each in known), *(drawn.log_flops for drawn in pool)])
    front += zip(flops_N[first:end].tolist(), prediction.ne_N[first:end].tolist(), strict=True)
    reference = (float(flops_N.max()), _worst(observations))
    return expected_gain(flops_N[end:], prediction.ne_N[end:], prediction.error_N[end:], front, reference)


def _worst(observations: Observations) -> float:
    return float(np.quantile([ne for _, ne in observations.finished[:STARTUP]], WORST))
