"""How well two trainings of the same candidates rank them alike: Kendall's tau-b, its interval, the regret.

Lower NE is better; a candidate that diverged has infinite NE. The interval is the percentile bootstrap over
candidates, paired: what another draw of as many candidates from the space could have given.
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
    x, y = np.asarray(ne), np.asarray(reference)
    draws = np.random.default_rng(seed).integers(len(x), size=(RESAMPLES, len(x)))
    taus = [tau for rows in draws if (tau := tau_b(x[rows], y[rows])) is not None]
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(taus, (tail, 1.0 - tail))
    return RankCorrelation(value=value, low=float(low), high=float(high))


def tau_of_best(ne: Ne, reference: Ne, share: float) -> float | None:
    """Tau-b among this share of the candidates, the best by the reference, which a front is made of."""
    count = math.ceil(share * len(reference))
    best = np.argsort(reference, kind="stable")[:count]
    return tau_b(np.asarray(ne)[best], np.asarray(reference)[best])


def regret_percent(ne: Ne, reference: Ne) -> float | None:
    """Excess of the reference NE of the best by `ne` over the lowest, in percent; None where that one diverged."""
    chosen, best = reference[int(np.argmin(ne))], min(reference)
    return 100.0 * (chosen - best) / best if math.isfinite(chosen) else None
