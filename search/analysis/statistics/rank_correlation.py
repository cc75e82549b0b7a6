"""How well two trainings of the same candidates rank them alike: Kendall's tau-b, its interval, the regret.

Lower NE is better; a candidate that diverged has infinite NE. The interval is the percentile bootstrap over
candidates, paired: what another draw of as many candidates from the space could have given.

Shapes: N candidates, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from dhen.values import Value

RESAMPLES = 2000
LEAST = 3
"""Number of candidates below which a tau is not shown: for two it is 1 or -1."""
Ne = Sequence[float] | NDArray[np.float64]
"""NE by candidate."""


class RankCorrelation(Value):
    """Kendall's tau-b, and its interval with the confidence asked for."""

    value: float
    low: float
    high: float


def tau_b(ne: Ne, reference: Ne) -> float | None:
    """Kendall's tau-b; None where it is not defined: too few candidates, or all equal."""
    if len(ne) < LEAST:
        return None
    tau = float(kendalltau(ne, reference, method="asymptotic").statistic)
    return None if math.isnan(tau) else tau


def tau_interval(ne: Ne, reference: Ne, confidence: float, seed: int) -> RankCorrelation | None:
    """Tau-b with its interval; equal seeds give equal intervals."""
    value = tau_b(ne, reference)
    if value is None:
        return None
    count = len(ne)
    draws = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    times_RN = np.stack([np.bincount(rows, minlength=count) for rows in draws]).astype(np.float64)
    x_NN, y_NN = _order(ne), _order(reference)

    def over_pairs(each_NN: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all pairs of candidates of each resample."""
        of_each_R: NDArray[np.float64] = ((times_RN @ each_NN) * times_RN).sum(axis=1)
        return of_each_R

    with np.errstate(invalid="ignore"):
        tau_R = over_pairs(x_NN * y_NN) / np.sqrt(over_pairs(np.abs(x_NN)) * over_pairs(np.abs(y_NN)))
    taus = tau_R[~np.isnan(tau_R)]
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(taus, (tail, 1.0 - tail))
    return RankCorrelation(value=value, low=float(low), high=float(high))


def _order(ne: Ne) -> NDArray[np.float64]:
    """1, 0 or -1 for each pair of candidates: which of them is better."""
    ne_N = np.asarray(ne)
    return (ne_N[:, None] > ne_N).astype(np.float64) - (ne_N[:, None] < ne_N)


def tau_of_best(ne: Ne, reference: Ne, share: float) -> float | None:
    """Tau-b among this share of the candidates, the best by the reference, which a front is made of."""
    count = math.ceil(share * len(reference))
    best = np.argsort(reference, kind="stable")[:count]
    return tau_b(np.asarray(ne)[best], np.asarray(reference)[best])


def regret_percent(ne: Ne, reference: Ne) -> float | None:
    """Excess of the reference NE of the best by `ne` over the lowest, in percent; None where that one diverged."""
    chosen, best = reference[int(np.argmin(ne))], min(reference)
    return 100.0 * (chosen - best) / best if math.isfinite(chosen) else None
