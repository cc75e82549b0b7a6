"""Forward times that are expected of candidates, from those that were measured: few are then proposed in vain.

Ridge regression of the logarithm of the time on what describes a network (`search.samplers.ranker.features`):
networks differ by factors, and small requests wait for the number of layers and modules more than for FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.samplers.draw import DrawnPoint
from search.samplers.ranker.features import Description, Encoder, describe

FEWEST_TIMED = 8
"""Number of measured candidates from which on a time is expected of others
(docs/decisions/0019-serving-limits.md): an assumption, not measured."""
PENALTY = 1.0
"""Penalty on the squared weights of standardised features, over the squared error of a candidate: an assumption,
not measured."""


def likely_in_time(
    timed: Sequence[tuple[Description, float]], pool: Sequence[DrawnPoint], max_ms: float | None
) -> list[DrawnPoint]:
    """The candidates of the pool that are expected to take no longer than the limit; all of them where too few are
    timed.

    Args:
        timed: descriptions of candidates with their measured milliseconds.
        pool: candidates in question.
        max_ms: the limit, if there is one.
    """
    if max_ms is None or len(timed) < FEWEST_TIMED or not pool:
        return list(pool)
    expected_N = _expected_ms(timed, pool)
    return [drawn for drawn, ms in zip(pool, expected_N, strict=True) if ms <= max_ms]


def _expected_ms(timed: Sequence[tuple[Description, float]], pool: Sequence[DrawnPoint]) -> np.ndarray:
    described = [*(description for description, _ in timed), *(describe(drawn.priced) for drawn in pool)]
    x_NF = Encoder(described).matrix(described)
    x_TF, log_T = x_NF[: len(timed)], np.log([ms for _, ms in timed])
    # features are standardised over the pool too, and the intercept has no penalty
    mean_F = x_TF.mean(axis=0)
    x_TF = x_TF - mean_F
    # by features, of which there are some dozens, while candidates may be thousands
    gram_FF = x_TF.T @ x_TF + PENALTY * np.eye(x_TF.shape[1])
    weights_F = np.linalg.solve(gram_FF, x_TF.T @ (log_T - log_T.mean()))
    expected_N: np.ndarray = np.exp(log_T.mean() + (x_NF[len(timed) :] - mean_F) @ weights_F)
    return expected_N
