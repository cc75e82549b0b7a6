"""Forecast of a candidate's final NE, from the curves of other candidates at the same milestone and after it.

Learning rates that fall to zero make curves drop at the end, which a formula fitted to one curve (Domhan et
al., IJCAI 2015) cannot know, and others' curves show. So what is left to gain is a linear regression, over those
that went on from the milestone to their end, on the lowest NE so far and on the last evaluation's gain (of a
curve that falls geometrically the rest is proportional to it). Neither may count against a candidate: a slow
learner far from all others is then given more than they had, not less. The bound is that of a new observation
under normal errors (Student's t with the regression's own leverage), and no tighter than the quantile of the
errors of those left out one at a time, once there are enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from scipy.special import stdtrit

from search.stopping.base import best_ne
from trials.record import TrialRecord

CONFIDENCE = 0.95
"""Confidence of the bound, one-sided: of twenty candidates one may come to a lower NE. Measured against 0.99
(benchmarks/search/stopping_replayed.py, docs/log.md, 2026-11-21): the same front in 97 % of the orders in place of
98 %, for 57 % of the examples in place of 70 %, at 60 candidates."""
LEAST_LEFT = 0.01
"""Smallest value of one less a leverage; an error is divided by it to become that of a candidate left out. An
assumption, not measured."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of the lowest NE at a candidate's end."""

    ne: float
    low: float
    """The optimistic bound of that NE."""


def forecast(candidate: TrialRecord, finished: Sequence[TrialRecord]) -> Forecast:
    """The forecast from the candidate's curve.

    Args:
        candidate: a trial whose curve ends at the milestone.
        finished: `base.FEWEST` trials or more that went on from the milestone to their end.
    """
    milestone = len(candidate.result.curve)
    x_NF = np.array([_features(trial, milestone) for trial in finished])
    left_N = np.array([_left(trial, milestone) for trial in finished])
    mean_F, mean = x_NF.mean(axis=0), left_N.mean()
    counts_F = nnls(x_NF - mean_F, left_N - mean)[0] > 0
    x_NF = (x_NF - mean_F)[:, counts_F]
    x_F = (np.array(_features(candidate, milestone)) - mean_F)[counts_F]
    inverse_FF = np.linalg.pinv(x_NF.T @ x_NF)
    weight_F = inverse_FF @ x_NF.T @ left_N
    error_N = left_N - mean - x_NF @ weight_F
    free = len(left_N) - 1 - len(x_F)
    deviation = np.sqrt((error_N**2).sum() / free * (1.0 + 1.0 / len(left_N) + x_F @ inverse_FF @ x_F))
    leverage_N = 1.0 / len(left_N) + np.einsum("nf,fg,ng->n", x_NF, inverse_FF, x_NF)
    half_width = max(
        stdtrit(free, CONFIDENCE) * deviation, _quantile(error_N / (1.0 - leverage_N).clip(LEAST_LEFT))
    )
    expected, lowest = max(mean + x_F @ weight_F, 0.0), best_ne(candidate, milestone)
    return Forecast(ne=float(lowest - expected), low=float(lowest - expected - half_width))


def _features(trial: TrialRecord, milestone: int) -> tuple[float, ...]:
    """The lowest NE so far, and by how much the last evaluation lowered it."""
    lowest = best_ne(trial, milestone)
    if milestone == 1:
        return (lowest,)
    before = best_ne(trial, milestone - 1)
    return (lowest, before - lowest if math.isfinite(before) else 0.0)


def _left(trial: TrialRecord, milestone: int) -> float:
    """Fall of a finished trial's NE after the milestone."""
    assert trial.result.validation is not None
    return best_ne(trial, milestone) - trial.result.validation.ne


def _quantile(error_N: np.ndarray) -> float:
    """The bound that a new error stays below with `CONFIDENCE`, by rank alone (conformal); 0 where too few errors
    are known."""
    rank = int(np.ceil(CONFIDENCE * (len(error_N) + 1)))
    return float(np.sort(error_N)[rank - 1]) if rank <= len(error_N) else 0.0
