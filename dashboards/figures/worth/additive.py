"""A ridge regression with intervals: what each of many parts adds, from trials that have some of them.

The penalty is the one of the lowest generalised cross-validation error. Intervals are percentiles over resamples
of the trials, each fitted anew with that penalty. Estimates are shrunk towards 0, the more so the fewer trials
there are.

Shapes: N trials, P columns, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PENALTIES = np.logspace(-1, 3, 17)
RESAMPLES = 300
SEED = 0
"""Of the resampling: the same study gives the same figure."""
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted additive model."""

    value_P: Floats
    low_P: Floats
    high_P: Floats
    """Ends of the 95 % intervals."""
    explained: float
    """Share of the variance that is explained of trials that the model has not seen, one left out at a time; 0 or
    less where it predicts no better than the mean."""


def fit(x_NP: Floats, y_N: Floats) -> Fit:
    """The model of y with a constant and a coefficient for each column."""
    penalty, explained = _penalty(x_NP, y_N)
    rows = len(y_N)
    counts_RN = np.random.default_rng(SEED).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    values_RP = np.stack([_ridge(x_NP, y_N, counts_N.astype(float), penalty) for counts_N in counts_RN])
    low_P, high_P = np.percentile(values_RP, INTERVAL, axis=0)
    return Fit(
        value_P=_ridge(x_NP, y_N, np.ones(rows), penalty), low_P=low_P, high_P=high_P, explained=explained
    )


def _penalty(x_NP: Floats, y_N: Floats) -> tuple[float, float]:
    """The penalty of the lowest generalised cross-validation error, and what is explained with it."""
    x, y = x_NP - x_NP.mean(axis=0), y_N - y_N.mean()
    u, singular, _ = np.linalg.svd(x, full_matrices=False)
    total = float(y @ y)
    best = (np.inf, float(PENALTIES[-1]), 0.0)
    for penalty in PENALTIES:
        share = singular**2 / (singular**2 + penalty)
        residual_N = y - u @ (share * (u.T @ y))
        freedom = 1.0 - (share.sum() + 1.0) / len(y)
        if freedom <= 0.0:
            continue
        error = float(residual_N @ residual_N) / freedom**2
        leverage_N = (u**2) @ share + 1.0 / len(y)
        unseen_N = residual_N / np.maximum(1.0 - leverage_N, 1e-9)
        explained = 1.0 - float(unseen_N @ unseen_N) / total if total else 0.0
        if error < best[0]:
            best = (error, float(penalty), explained)
    return best[1:]


def _ridge(x_NP: Floats, y_N: Floats, weight_N: Floats, penalty: float) -> Floats:
    """Coefficients under a penalty, with weights of trials and a constant that is not penalised."""
    weight = weight_N / weight_N.sum()
    x, y = x_NP - weight @ x_NP, y_N - float(weight @ y_N)
    weighted_PN = (x * weight_N[:, None]).T
    coefficients: Floats = np.linalg.solve(weighted_PN @ x + penalty * np.eye(x.shape[1]), weighted_PN @ y)
    return coefficients
