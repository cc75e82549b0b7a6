"""The ranker's proposal: of many points that are new and fit, the one that is expected to add most to the front.

After the ranked-pair predictor of arXiv 2311.07870 and the predictor ensemble of BANANAS (arXiv 1910.11858):
rankers learn from pairs of candidates (`ensemble`), their scores are read as NE (`calibration`), and the gain
is what the front is expected to grow by (`acquisition`). Candidates that still train stand on the front with
the NE that is expected of them, so that no similar one is proposed beside them.
"""

from __future__ import annotations

import math
import random
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from scipy.special import ndtr

from dhen.config import DhenConfig
from search.samplers.context import CandidatePricer, PricedCandidate, SamplerContext, evenly, near
from search.samplers.ranker.ensemble import final_ne, has_shown, predict_ne
from spaces.space import Point
from trials.records.trial_record import TrialRecord

# What a candidate is expected to add to the front: the area between NE and log FLOPs that it would newly cover.
#
# The expected hypervolume improvement of two objectives (Emmerich et al., CEC 2011), of which one, FLOPs, is
# known before training, and NE is expected with a normal error: a sum over the stairs of the front, in closed
# form.

Corner = tuple[float, float]
"""Log FLOPs and NE of a candidate."""


def expected_gain(
    log_flops_N: np.ndarray,
    ne_N: np.ndarray,
    error_N: np.ndarray,
    front: Iterable[Corner],
    reference: Corner,
) -> np.ndarray:
    """Expected gains gain_N of candidates with these FLOPs and expected NE; the area counts up to `reference`."""
    starts_S, levels_S = _stairs(front, reference)
    ends_S = np.append(starts_S[1:], reference[0])
    gain_N = np.zeros(len(log_flops_N))
    for start, end, level in zip(starts_S, ends_S, levels_S, strict=True):
        width_N = np.clip(end - np.maximum(start, log_flops_N), 0.0, None)
        # expected distance of a normal NE below the level, counted as 0 if it lies above
        z_N = (level - ne_N) / error_N
        density_N = np.exp(-0.5 * z_N**2) / np.sqrt(2.0 * np.pi)
        gain_N += width_N * (error_N * (density_N + z_N * ndtr(z_N)))
    return gain_N


def hypervolume(points: Iterable[Corner], reference: Corner) -> float:
    """The area between NE and log FLOPs that points cover up to the reference."""
    starts_S, levels_S = _stairs(points, reference)
    widths_S = np.diff(np.append(starts_S[1:], reference[0]))
    return float((widths_S * (reference[1] - levels_S[1:])).sum())


def _stairs(points: Iterable[Corner], reference: Corner) -> tuple[np.ndarray, np.ndarray]:
    """Start of each stair in log FLOPs, the first at minus infinity, and the lowest NE to be had there."""
    starts, levels = [-np.inf], [reference[1]]
    for edge, ne in sorted(points):
        if edge < reference[0] and ne < levels[-1]:
            starts.append(edge)
            levels.append(ne)
    return np.array(starts), np.array(levels)


# What a ranker sees of a candidate: numbers of the decoded network, its cost and how it is trained.
#
# The numbers describe the network, not the point: points that decode to the same network have the same features,
# the order of modules and settings of absent modules have none. Shares (how many attention modules a layer has)
# are 0 if there is nothing; sizes (heads of attention) are the average of the other candidates if there is
# nothing.

LOG_FROM_RATIO = 4.0
"""Sizes that are all positive and differ by this factor or more are compared by their logarithms: an assumption,
not measured apart."""
SMALLEST_DEVIATION = 1e-9
"""Deviation up to which a column counts as the same for all candidates: an assumption, the size of rounding
errors."""
SAME_DECIMALS = 6
"""Standardised columns that are equal to so many decimals count as one: an assumption, not measured apart."""
SMALLEST_SIZE = 1e-30
"""Size in place of zero, of which there is no logarithm: an assumption, below any size there is."""
DESCRIBED_APART = ("layers", "members", "members_from")
"""Fields of a network that `describe` takes by themselves."""


@dataclass(frozen=True)
class Description:
    """Named numbers of one candidate."""

    shares: dict[str, float] = field(default_factory=dict)
    """How many there are of a thing; 0 if there is none."""
    sizes: dict[str, float] = field(default_factory=dict)
    """How large a thing is; unknown if there is none."""


def describe(priced: PricedCandidate) -> Description:
    """A candidate in numbers: the first, the last and the average layer, the whole network, its training."""
    model = priced.candidate.model
    network = Description(sizes={"flops": max(priced.flops, 1.0), "parameters": max(priced.parameters, 1)})
    network.sizes.update(depth=len(model.layers), members=model.members, members_from=model.members_from)
    _take("model", {key: value for key, value in model if key not in DESCRIBED_APART}, network)
    _take("training", priced.candidate.training, network)
    layers = _layers(model)
    for name, selected in (("layers", layers), ("first", layers[:1]), ("last", layers[-1:])):
        _average(name, selected, network)
    return network


class DescriptionEncoder:
    """An encoder of descriptions as standardised numbers, by the means and deviations of some of them."""

    def __init__(self, described: Sequence[Description]) -> None:
        """An encoder fit to `described`; columns that do not vary, or repeat another column, are left out."""
        self._shares = sorted({name for description in described for name in description.shares})
        self._sizes = sorted({name for description in described for name in description.sizes})
        x_NF = self._raw(described)
        low_F, high_F = np.nanmin(x_NF, axis=0), np.nanmax(x_NF, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._logarithmic = (low_F > 0) & (high_F / low_F >= LOG_FROM_RATIO)
        x_NF = self._scaled(x_NF)
        self._mean_F, self._deviation_F = np.nanmean(x_NF, axis=0), np.nanstd(x_NF, axis=0)
        self._kept = np.flatnonzero(self._deviation_F > SMALLEST_DEVIATION)
        _, first = np.unique(self.matrix(described).round(SAME_DECIMALS), axis=1, return_index=True)
        self._kept = self._kept[np.sort(first)]

    def matrix(self, described: Sequence[Description]) -> np.ndarray:
        """The matrix x_NF, a row per candidate."""
        x_NF = (self._scaled(self._raw(described)) - self._mean_F)[:, self._kept]
        standardised_NF: np.ndarray = np.nan_to_num(x_NF / self._deviation_F[self._kept])
        return standardised_NF

    def _raw(self, described: Sequence[Description]) -> np.ndarray:
        shares = [[description.shares.get(name, 0.0) for name in self._shares] for description in described]
        sizes = [[description.sizes.get(name, math.nan) for name in self._sizes] for description in described]
        return np.hstack([np.array(shares).reshape(len(described), -1), np.array(sizes)])

    def _scaled(self, x_NF: np.ndarray) -> np.ndarray:
        x_NF = x_NF.copy()
        x_NF[:, self._logarithmic] = np.log(np.maximum(x_NF[:, self._logarithmic], SMALLEST_SIZE))
        return x_NF


def _layers(model: DhenConfig) -> list[Description]:
    """A description of each layer: how many modules of each kind, their settings averaged over the kind."""
    layers = []
    for layer in model.layers:
        description = Description()
        _take("", layer.model_dump(exclude={"modules", "ensemble"}), description)
        description.shares[f"ensemble={layer.ensemble.kind}"] = 1.0
        _take("ensemble", layer.ensemble.model_dump(exclude={"kind"}), description)
        by_kind: dict[str, list[Description]] = {}
        for module in layer.modules:
            settings = Description()
            _take("", module.model_dump(exclude={"kind"}), settings)
            by_kind.setdefault(module.kind, []).append(settings)
        for kind, module_settings in by_kind.items():
            description.shares[kind] = len(module_settings)
            _average(kind, module_settings, description)
        layers.append(description)
    return layers


def _take(prefix: str, values: Mapping[str, Any], into: Description) -> None:
    """Adds numbers as sizes, widths as their sum and length, nested values one by one, and others as shares."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, (bool, int, float)):
            into.sizes[name] = float(value)
        elif isinstance(value, Mapping):
            _take(name, value, into)
        elif isinstance(value, (tuple, list)) and all(isinstance(width, (int, float)) for width in value):
            into.sizes[f"{name}.widths"] = float(sum(value))
            into.sizes[f"{name}.length"] = float(len(value))
        else:
            into.shares[f"{name}={value}"] = 1.0


def _average(prefix: str, described: Sequence[Description], into: Description) -> None:
    for key, values in _gathered(layer.shares for layer in described).items():
        into.shares[f"{prefix}.{key}"] = sum(values) / len(described)
    for key, values in _gathered(layer.sizes for layer in described).items():
        into.sizes[f"{prefix}.{key}"] = sum(values) / len(values)


def _gathered(named_numbers: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    gathered: dict[str, list[float]] = {}
    for numbers in named_numbers:
        for key, value in numbers.items():
            gathered.setdefault(key, []).append(value)
    return gathered


# Forward times that are expected of candidates, from those that were measured: few are then proposed in vain.
#
# Ridge regression of the logarithm of the time on what describes a network:
# networks differ by factors, and small requests wait for the number of layers and modules more than for FLOPs.

FEWEST_TIMED = 8
"""Number of measured candidates from which on a time is expected of others
(docs/decisions/0018-serving-limits.md): an assumption, not measured."""
PENALTY = 1.0
"""Penalty on the squared weights of standardised features, over the squared error of a candidate: an assumption,
not measured."""


def likely_in_time(
    timed: Sequence[tuple[Description, float]], pool: Sequence[PricedCandidate], max_ms: float | None
) -> list[PricedCandidate]:
    """The candidates of the pool that are expected to take no longer than the limit; all of them if too few are
    timed.

    Args:
        timed: descriptions of candidates with their measured milliseconds.
        pool: candidates in question.
        max_ms: the limit, if there is one.
    """
    if max_ms is None or len(timed) < FEWEST_TIMED or not pool:
        return list(pool)
    described = [*(description for description, _ in timed), *(describe(drawn) for drawn in pool)]
    x_NF = DescriptionEncoder(described).matrix(described)
    x_TF, log_T = x_NF[: len(timed)], np.log([ms for _, ms in timed])
    # features are standardised over the pool too, and the intercept has no penalty
    mean_F = x_TF.mean(axis=0)
    x_TF = x_TF - mean_F
    # by features, of which there are some dozens, while candidates may be thousands
    gram_FF = x_TF.T @ x_TF + PENALTY * np.eye(x_TF.shape[1])
    weights_F = np.linalg.solve(gram_FF, x_TF.T @ (log_T - log_T.mean()))
    expected_N = np.exp(log_T.mean() + (x_NF[len(timed) :] - mean_F) @ weights_F)
    return [drawn for drawn, ms in zip(pool, expected_N, strict=True) if ms <= max_ms]


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


class KnownPoint:
    """A point that was proposed, and what is known of it without training; of its network the description alone
    stays, in little memory and with names that it shares with others, since there may be thousands."""

    __slots__ = ("_names", "_numbers", "_shares", "fingerprint", "log_flops", "point")

    def __init__(self, priced: PricedCandidate) -> None:
        self.point, self.fingerprint, self.log_flops = priced.point, priced.fingerprint, priced.log_flops
        description = describe(priced)
        self._names = tuple(map(sys.intern, (*description.shares, *description.sizes)))
        self._numbers = array("d", (*description.shares.values(), *description.sizes.values()))
        self._shares = len(description.shares)

    @property
    def description(self) -> Description:
        """The candidate in numbers."""
        pairs = list(zip(self._names, self._numbers, strict=True))
        return Description(dict(pairs[: self._shares]), dict(pairs[self._shares :]))


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
    """Candidates that have ended, with their forward time in milliseconds, if it was measured."""

    finished: list[tuple[KnownPoint, float]] = field(default_factory=list)
    """Candidates with an NE at their end, and that NE."""


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
        if number not in context.kept:  # worked out once; None if the point gives no model
            priced = context.pricer.price(context.points[number])
            context.kept[number] = None if priced is None else KnownPoint(priced)
        known: KnownPoint | None = context.kept[number]
        record = context.records.get(number)
        if known is None or known.fingerprint in observations.taken:
            continue
        observations.taken.add(known.fingerprint)
        if record is not None and has_shown(record):
            observations.shown.append(known)
            observations.records.append(record)
            ne = final_ne(record)
            if ne is not None and math.isfinite(ne):
                observations.finished.append((known, ne))
        if record is None or record.result.outcome.unfinished:
            observations.pending.append(known)
        elif record.plan.serving_ms is not None:
            observations.timed.append((known, record.plan.serving_ms))
    return observations


def _first_that_fits(drawn: Iterable[PricedCandidate], pricer: CandidatePricer, rng: random.Random) -> Point:
    """The first drawn point that fits. If none of many does, the first of all, which the plan then refuses or
    which takes long; if nothing new is drawn, any point: the study counts how often that happens, and ends."""
    first, began = None, time.monotonic()
    # if an axis is a range new points never end, and of one architecture, which is tuned, none may fit
    for drawn_point in islice(drawn, MOST_TRIED):
        first = first or drawn_point
        if pricer.fits(drawn_point.candidate):
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


def _gains(observations: Observations, pool: list[PricedCandidate], seed: int) -> np.ndarray:
    """Expected gains gain_P of the points in the pool."""
    known = [*observations.shown, *observations.pending]
    described = [each.description for each in known]
    described += [describe(drawn) for drawn in pool]
    x_NF = DescriptionEncoder(described).matrix(described)
    ne_N, error_N = predict_ne(x_NF, observations.records, np.random.default_rng(seed))
    front: list[Corner] = [(each.log_flops, ne) for each, ne in observations.finished]
    first, end = len(observations.shown), len(observations.shown) + len(observations.pending)
    flops_N = np.array([*(each.log_flops for each in known), *(drawn.log_flops for drawn in pool)])
    front += zip(flops_N[first:end].tolist(), ne_N[first:end].tolist(), strict=True)
    worst = float(np.quantile([ne for _, ne in observations.finished[:STARTUP]], WORST))
    return expected_gain(flops_N[end:], ne_N[end:], error_N[end:], front, (float(flops_N.max()), worst))
