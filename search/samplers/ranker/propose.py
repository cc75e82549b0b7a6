"""The ranker's proposal: of many points that are new and fit, the one that is expected to add most to the front.

After the ranked-pair predictor of arXiv 2311.07870 and the predictor ensemble of BANANAS (arXiv 1910.11858):
rankers learn from pairs of candidates (`ensemble`), their scores are read as NE (`belief`), and the gain is what
the front is expected to grow by (`gain`). Candidates that still train stand on the front with the NE that is
expected of them, so that no second one is proposed beside them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from search.samplers.context import Known
from search.samplers.draw import Drawn, evenly, near
from search.samplers.ranker.acquisition import Corner, expected_gain
from search.samplers.ranker.calibration import believe
from search.samplers.ranker.features import Encoder, describe
from search.samplers.ranker.latency import likely_in_time
from search.samplers.ranker.pairs import final_ne, has_shown
from search.samplers.static_cost import Appraiser
from spaces.catalog_loader import random_point
from spaces.space import Point
from trials.record import TrialRecord

STARTUP = 12
"""Candidates with an NE at their end from which on the rankers are asked; before, points are random: an
assumption, not measured apart."""
STARTUP_DRAWS = 20
"""Random points of which one is taken before, the first that is expected to meet serving.max_ms: an assumption,
not measured apart."""
EVENLY = 120
"""Points drawn from the whole space for a proposal: an assumption, not measured apart."""
NEAR = 180
"""Points drawn near good candidates for a proposal: an assumption, not measured apart."""
BEST = 4
"""Candidates of lowest NE near which points are drawn, beside those on the front: an assumption, not measured
apart."""
WORST = 0.75
"""Quantile of the first candidates' NE up to which the front's area counts: an assumption, not measured apart."""


@dataclass(frozen=True)
class Standing:
    """A study, each candidate once; twins share their result."""

    taken: set[str] = field(default_factory=set)
    """Fingerprints of all that was proposed."""
    shown: list[Drawn] = field(default_factory=list)
    """Candidates with an NE, or with a curve that has begun."""
    records: list[TrialRecord] = field(default_factory=list)
    """The records of `shown`, in its order."""
    pending: list[Drawn] = field(default_factory=list)
    """Candidates that have not ended."""
    timed: list[tuple[Drawn, float]] = field(default_factory=list)
    """Candidates that have ended, with their forward time in milliseconds, where it was measured."""

    @property
    def finished(self) -> list[tuple[Drawn, float]]:
        """Candidates with an NE at their end, and that NE."""
        pairs = ((drawn, final_ne(record)) for drawn, record in zip(self.shown, self.records, strict=True))
        return [(drawn, ne) for drawn, ne in pairs if ne is not None and math.isfinite(ne)]


def propose(known: Known, seed: int) -> Point:
    """A point; the same for the same seed and knowledge."""
    standing, rng, appraiser = standing_of(known), random.Random(seed), known.appraiser
    anywhere = evenly(appraiser, standing.taken, rng, known.fixed)
    max_ms = appraiser.serving.max_ms
    if len(standing.finished) < STARTUP:
        in_time = likely_in_time(
            standing.timed, list(islice(anywhere, STARTUP_DRAWS if max_ms else 0)), max_ms
        )
        return _first_that_fits(chain(in_time, anywhere), appraiser, rng)
    pool = list(islice(anywhere, EVENLY))
    pool += islice(near(appraiser, _good(standing), standing.taken, rng, known.fixed), NEAR)
    pool = likely_in_time(standing.timed, pool, max_ms) or pool
    order = np.argsort(-_gains(standing, pool, seed), kind="stable")
    return _first_that_fits(chain((pool[index] for index in order), anywhere), appraiser, rng)


def standing_of(known: Known) -> Standing:
    """What is known of a study, in the order of its trials."""
    standing = Standing()
    for number in sorted(known.points):
        appraisal, record = known.appraisal(number), known.records.get(number)
        if appraisal is None or appraisal.fingerprint in standing.taken:
            continue
        drawn = Drawn(known.points[number], appraisal)
        standing.taken.add(appraisal.fingerprint)
        if record is not None and has_shown(record):
            standing.shown.append(drawn)
            standing.records.append(record)
        if known.unfinished(number):
            standing.pending.append(drawn)
        elif record is not None and record.plan.serving_ms is not None:
            standing.timed.append((drawn, record.plan.serving_ms))
    return standing


def _first_that_fits(drawn: Iterable[Drawn], appraiser: Appraiser, rng: random.Random) -> Point:
    """Where nothing new fits, any point: the study counts how often nothing new comes, and ends."""
    for candidate in drawn:
        if appraiser.fits(candidate.appraisal.candidate):
            return candidate.point
    return random_point(appraiser.space, rng)


def _good(standing: Standing) -> list[Point]:
    """Points of the front, and of the lowest NE."""
    by_ne = sorted(standing.finished, key=lambda pair: pair[1])
    front, least = [], math.inf
    for drawn, _ne in by_ne:
        if drawn.log_flops < least:
            least = drawn.log_flops
            front.append(drawn.point)
    return front + [drawn.point for drawn, _ in by_ne[:BEST]]


def _gains(standing: Standing, pool: list[Drawn], seed: int) -> np.ndarray:
    """gain_P of the pool."""
    everyone = [*standing.shown, *standing.pending, *pool]
    described = [describe(drawn.appraisal) for drawn in everyone]
    belief = believe(Encoder(described).matrix(described), standing.records, np.random.default_rng(seed))
    front: list[Corner] = [(drawn.log_flops, ne) for drawn, ne in standing.finished]
    first, end = len(standing.shown), len(standing.shown) + len(standing.pending)
    flops_N = np.array([drawn.log_flops for drawn in everyone])
    front += zip(flops_N[first:end].tolist(), belief.ne_N[first:end].tolist(), strict=True)
    reference = (float(flops_N.max()), _worst(standing))
    return expected_gain(flops_N[end:], belief.ne_N[end:], belief.error_N[end:], front, reference)


def _worst(standing: Standing) -> float:
    return float(np.quantile([ne for _, ne in standing.finished[:STARTUP]], WORST))
