"""The choice of a study's best: within the noise of choosing, the steadier and the cheaper, perhaps the baseline.

It is the one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984, section 3.4.3), in
pairs: what is worse than the lowest NE by no more than one standard error of that very difference is as good as
the lowest, as far as these rows can say. The baseline, which was not chosen among many, is as good where it is
worse by no more than that and what the lowest owes to having been chosen; then it is the best, unless it is over
a limit: what is new has to show that it is better. Else, of those as good, the ones that are worse than the
baseline in the fewest periods stand first, then the one with the fewest FLOPs.

Shapes: C trials, K blocks, P periods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.analysis.statistics.selection import optimism_percent, relative_percent, standard_errors
from trials.choice import Judged
from trials.data.example_weights import Floats
from trials.record import TrialRecord

LEAST_BLOCKS = 2
"""Number of blocks in a period below which it has no standard error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Losses of trials on the same rows, which none of them was trained on."""

    trials: tuple[TrialRecord, ...]
    """The baseline first, then candidates and averages."""
    loss_CK: Floats
    """Sums of weighted losses by trial and block of rows."""
    period_K: NDArray[np.int64]
    """Number of the period that each block lies in, 0, 1, 2 ... in time."""

    def of(self, numbers: Sequence[int]) -> Evidence:
        """The evidence of the baseline and of these trials alone."""
        kept = [
            index for index, trial in enumerate(self.trials) if index == 0 or trial.number in set(numbers)
        ]
        return Evidence(
            trials=tuple(self.trials[index] for index in kept),
            loss_CK=self.loss_CK[kept],
            period_K=self.period_K,
        )

    def and_earlier(self, loss_CK: Floats, period_K: NDArray[np.int64]) -> Evidence:
        """The evidence with earlier periods of the same trials put before it."""
        return Evidence(
            trials=self.trials,
            loss_CK=np.concatenate([loss_CK, self.loss_CK], axis=1),
            period_K=np.concatenate([period_K, self.period_K + period_K.max() + 1]),
        )

    @property
    def periods(self) -> int:
        """Number of periods, P."""
        return int(self.period_K.max()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The best of some trials, and what it was chosen by."""

    best: int
    lowest: int
    optimism_percent: float
    judged: tuple[Judged, ...]


def judge(evidence: Evidence, *, optimism: float | None = None) -> Verdict:
    """The best by the rule of this file.

    Args:
        evidence: losses of all that may be the best.
        optimism: what the lowest owes to having been chosen, in percent, where it was chosen among more than
            these; None: worked out from these.
    """
    trials, loss_CK = evidence.trials, evidence.loss_CK
    if optimism is None:
        optimism = optimism_percent(loss_CK[1:])
    # the baseline is trained although it may be over limits that the best has to keep
    first = int(len(trials) > 1 and _is_over_limits(trials[0]))
    lowest = first + int(loss_CK[first:].sum(axis=1).argmin())
    percent_C = relative_percent(loss_CK, loss_CK[lowest])
    error_C = standard_errors(loss_CK, loss_CK[lowest])
    noise_C = error_C.copy()
    noise_C[0] += optimism  # the others, too, were chosen on these rows
    by_period_PC, worse_C = _by_period(evidence)
    judged = [
        Judged(
            trial=trial.number,
            percent=float(percent_C[index]),
            standard_error=float(error_C[index]),
            close=bool(index == lowest or percent_C[index] <= noise_C[index]),
            by_period=tuple(float(percent) for percent in by_period_PC[:, index]),
            worse_periods=int(worse_C[index]),
        )
        for index, trial in enumerate(trials)
    ]
    flops = {trial.number: trial.job.flops or 0.0 for trial in trials}
    if judged[0].close and not first:
        best = judged[0]
    else:
        best = min(
            (verdict for verdict in judged[1:] if verdict.close),
            key=lambda verdict: (verdict.worse_periods, flops[verdict.trial], verdict.trial),
        )
    return Verdict(
        best=best.trial,
        lowest=trials[lowest].number,
        optimism_percent=optimism,
        judged=tuple(sorted(judged, key=lambda verdict: verdict.trial)),
    )


def _is_over_limits(baseline: TrialRecord) -> bool:
    """Whether the baseline, which is trained all the same, fits no memory or is over a limit."""
    plan = baseline.plan
    return any(excess is not None and excess > 0.0 for excess in (plan.memory_excess, plan.serving_excess))


def _by_period(evidence: Evidence) -> tuple[Floats, NDArray[np.int64]]:
    """NE relative to the baseline's by period (P, C), and in how many each is worse by a standard error (C)."""
    percents, worse_C = [], np.zeros(len(evidence.trials), dtype=np.int64)
    for loss_CK in _periods(evidence):
        percent_C = relative_percent(loss_CK, loss_CK[0])
        percents.append(percent_C)
        if loss_CK.shape[1] >= LEAST_BLOCKS:
            worse_C += percent_C > standard_errors(loss_CK, loss_CK[0])
    worse_C[0] = 0  # the baseline is as good as itself, whatever rounding says
    return np.stack(percents), worse_C


def _periods(evidence: Evidence) -> Iterator[Floats]:
    for period in range(evidence.periods):
        yield evidence.loss_CK[:, evidence.period_K == period]
