"""Curves side by side: who was ahead at the latest number of examples that both of two candidates have seen.

A candidate that was stopped, or still trains, is compared by what it showed; how much that says about the end
is taken from candidates that went on to it (the regression of their last NE on what they had shown by then).

Shapes: N candidates, G numbers of examples and the end, pairs of L and R candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from search.samplers.ranker.ensemble import Pairs
from trials.record import Outcome, TrialRecord

FEWEST_FINISHED = 6
"""Number of finished candidates from which on the regression is believed; before, differences count as they are:
an assumption, not measured apart."""
SLOPES = (0.0, 2.0)
"""Bounds of the share of an early difference in NE is left at the end: an assumption, not measured apart."""


def final_ne(record: TrialRecord) -> float | None:
    """NE at the end of a training; infinite where it diverged, None where it has not ended so far."""
    if record.result.outcome is Outcome.DIVERGED:
        return math.inf
    if record.result.outcome is not Outcome.COMPLETED or record.result.validation is None:
        return None
    return None if math.isnan(record.result.validation.ne) else record.result.validation.ne


def has_shown(record: TrialRecord) -> bool:
    """Whether the record has an NE, at its end or on its curve so far, to compare it by."""
    if record.result.outcome in (Outcome.STOPPED, Outcome.RUNNING, Outcome.INTERRUPTED):
        return not all(map(math.isnan, record.result.curve.ne))
    return final_ne(record) is not None


class Comparison:
    """What the trainings say about pairs of candidates that have shown something; pairs are made as they are asked
    for, since all pairs of thousands of candidates fill gigabytes."""

    def __init__(self, records: Sequence[TrialRecord], temperature: float) -> None:
        """A comparison in which at this difference in NE the odds are e to 1.

        At least one candidate has an NE; candidates that diverged are as bad as the worst of those with an NE.
        """
        self._temperature = temperature
        examples = sorted({seen for record in records for seen in record.result.curve.examples})
        ne_NG = np.stack([_best_so_far(record, examples) for record in records])
        self._last_N = ne_NG.shape[1] - 1 - np.argmax(~np.isnan(ne_NG[:, ::-1]), axis=1)
        fits = [_regression(ne_NG[:, column], ne_NG[:, -1]) for column in range(ne_NG.shape[1])]
        self._slope_G, error_G = np.array(fits).T
        self._weight_G = temperature**2 / (temperature**2 + 2.0 * error_G**2)
        self._ne_NG = np.where(np.isinf(ne_NG), ne_NG[np.isfinite(ne_NG)].max(), ne_NG)

    def among(self, left: np.ndarray, right: np.ndarray) -> Pairs:
        """The pairs of these candidates, by their rows."""
        common_LR = np.minimum(self._last_N[left][:, None], self._last_N[right])
        logit_LR = self._ne_at(right, common_LR) - self._ne_at(left[:, None], common_LR)
        logit_LR *= self._slope_G.take(common_LR)
        logit_LR /= self._temperature
        weight_LR = self._weight_G.take(common_LR)
        # nothing is said of a candidate and itself, or where one has shown nothing at what both have reached
        silent_LR = np.isnan(logit_LR) | (left[:, None] == right)
        logit_LR[silent_LR] = weight_LR[silent_LR] = 0.0
        return Pairs(logit_LR, weight_LR)

    def _ne_at(self, rows: np.ndarray, columns_LR: np.ndarray) -> np.ndarray:
        """NE of candidates at numbers of examples, by one index each: a gather by two takes twice as long."""
        ne_LR: np.ndarray = self._ne_NG.take(rows * self._ne_NG.shape[1] + columns_LR)
        return ne_LR


def _best_so_far(record: TrialRecord, examples: Sequence[int]) -> np.ndarray:
    """Lowest NE up to each number of examples, then NE at the end; NaN for what the candidate has not reached."""
    row, best = np.full(len(examples) + 1, math.nan), math.inf
    points = dict(zip(record.result.curve.examples, record.result.curve.ne, strict=True))
    final = final_ne(record)
    last = max(points, default=0)
    for column, seen in enumerate(examples):
        ne = points.get(seen, math.nan)
        best = best if math.isnan(ne) else min(best, ne)
        if seen <= last and math.isfinite(best):
            row[column] = best
    if final is not None:
        row[len(examples)] = final
        row[[seen > last for seen in examples] + [False]] = final
    return row


def _regression(early: np.ndarray, final: np.ndarray) -> tuple[float, float]:
    """Slope (within `SLOPES`) and standard error of the last NE, given an early one."""
    both = np.isfinite(early) & np.isfinite(final)
    x, y = early[both], final[both]
    if len(x) < FEWEST_FINISHED or x.std() == 0:
        return 1.0, 0.0
    slope = float(np.clip(np.cov(x, y, bias=True)[0, 1] / x.var(), *SLOPES))
    rest = y - y.mean() - slope * (x - x.mean())
    return slope, float(np.sqrt((rest**2).sum() / max(len(x) - 2, 1)))
