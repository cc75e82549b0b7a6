"""Scores read as NE: what is expected of candidates, and how sure that is.

A member's score of a candidate that it did not learn from is an honest prediction; the line from such scores to NE
gives every score an NE. The error of that NE is what the members expect, which grows with the distance from known
candidates, and their disagreement, both times the factor that held-out candidates show to be missing.

Shapes: N candidates, F features, R records (the first of the candidates), E members of the ensemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.samplers.ranker.ensemble import train
from search.samplers.ranker.pairs import Comparison, final_ne
from trials.record import TrialRecord

TEMPERATURE = 0.5
"""Difference in NE, over that of the median and the best, at which the odds of a pair are e to 1. Chosen on the
made-up function of benchmarks/search/samplers_on_surrogate.py (docs/log.md, 2026-11-21, 2 cores): with a tenth of
NE's spread expectations were off by 0.005 on average, with half of it mostly by less than 0.002, in one repeat."""
TAIL = 2.0
"""NE counts up to so many times the difference of median and best above the median, so that a bad candidate says
that it is bad and not how bad: an assumption, not measured apart."""
SLOPES = (0.5, 1.5)
"""Bounds of the line's slope, over the temperature, since few candidates do not show it well: an assumption, not
measured apart."""
ERROR_SCALES = (0.3, 3.0)
"""Bounds of the error that held-out candidates show over the error that the members expect: an assumption, not
measured apart."""
SMALLEST_SPREAD = 1e-9
"""Smallest difference of the median from the best in NE, for candidates that are all alike: an assumption, far
below any noise."""


@dataclass(frozen=True)
class Prediction:
    """NE that is expected of N candidates."""

    ne_N: np.ndarray
    error_N: np.ndarray
    """Standard error of NE."""


@dataclass(frozen=True)
class Calibration:
    """The line NE = level + slope * score; errors are `error_scale` times those that the members expect."""

    level: float
    slope: float
    error_scale: float


def predict_ne(x_NF: np.ndarray, records: Sequence[TrialRecord], rng: np.random.Generator) -> Prediction:
    """The prediction for all rows by rankers that learned from `records`; the first rows are those records'
    candidates."""
    ne_R = _bounded(np.array([_or_nan(final_ne(record)) for record in records]))
    temperature = TEMPERATURE * _spread(ne_R)
    rankers = train(x_NF[: len(records)], Comparison(records, temperature).among, rng)
    score_EN = np.stack([ranker.scores(x_NF) for ranker in rankers])
    variance_EN = np.stack([ranker.variances(x_NF) for ranker in rankers]) + score_EN.var(axis=0)
    held_out_ER = np.zeros((len(rankers), len(records)), dtype=bool)
    for row, ranker in zip(held_out_ER, rankers, strict=True):
        row[ranker.held_out] = True
    calibration = _calibration(
        _mean_of(score_EN[:, : len(records)], held_out_ER),
        _mean_of(variance_EN[:, : len(records)], held_out_ER),
        ne_R,
        temperature,
    )
    error_N = np.sqrt(variance_EN.mean(axis=0)) * calibration.error_scale * -calibration.slope
    return Prediction(calibration.level + calibration.slope * score_EN.mean(axis=0), error_N)


def _bounded(ne_R: np.ndarray) -> np.ndarray:
    finite = ne_R[np.isfinite(ne_R)]
    bounded_R: np.ndarray = np.minimum(ne_R, np.median(finite) + TAIL * _spread(ne_R))
    return bounded_R


def _spread(ne_R: np.ndarray) -> float:
    finite = ne_R[np.isfinite(ne_R)]
    return max(float(np.median(finite) - finite.min()), SMALLEST_SPREAD)


def _mean_of(value_ER: np.ndarray, held_out_ER: np.ndarray) -> np.ndarray:
    """Mean over the members that a candidate was kept from; NaN where there is no such member."""
    count_R = held_out_ER.sum(axis=0)
    total_R = (value_ER * held_out_ER).sum(axis=0)
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)


def _calibration(
    score_R: np.ndarray, variance_R: np.ndarray, ne_R: np.ndarray, temperature: float
) -> Calibration:
    """The line from held-out scores to NE."""
    both = np.isfinite(score_R) & np.isfinite(ne_R)
    x, y = score_R[both], ne_R[both]
    steepness = -float(np.cov(x, y, bias=True)[0, 1]) / (float(x.var()) or 1.0) / temperature
    slope = -temperature * float(np.clip(steepness, *SLOPES))
    level = float(y.mean() - slope * x.mean())
    off = (y - level - slope * x) ** 2 / (slope**2 * np.maximum(variance_R[both], 1e-12))
    return Calibration(level, slope, float(np.clip(np.sqrt(off.mean()), *ERROR_SCALES)))


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
