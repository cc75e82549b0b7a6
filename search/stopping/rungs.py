"""Successive halving, asynchronous, among candidates of similar FLOPs (ASHA, arXiv 1810.05934).

At a rung, an evaluation that all trainings of one schedule come to, a candidate is compared with those nearest in
log FLOPs that were there. It goes on if it is among the best third, or if none of them with no more FLOPs is
ahead of it: it may be on the front. Others are stopped, with their checkpoint kept, and go on from it if they turn
out to be among the best third of those that have come since.

Where rungs are is not given but found. An evaluation can only tell candidates apart as well as the log lets it, so
the first rung is the earliest one whose ranking of the candidates that went on agrees with that of their ends
(Kendall's tau, by the lower end of its interval); each further one is three times as far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from search.pareto import ne_of, own
from search.stopping.base import FEWEST, Stop, best_ne, like, schedule_of, went_on
from trials.record import Outcome, TrialRecord

REDUCTION = 3
"""Factor by which evaluations grow from rung to rung; one candidate of so many goes on. An assumption, not
measured."""
NEIGHBOURS = 11
"""Number of candidates of similar FLOPs that a candidate is compared with: an assumption, not measured. With the
candidate itself they are a multiple of `REDUCTION`."""
LEAST_TAU = 0.2
"""Kendall's tau between an evaluation and the end from which candidates are compared there: an assumption, not
measured."""
QUANTILE = 1.645
"""Normal quantile of the confidence, 95 % and one-sided, with which tau is as high as that: the confidence
is an assumption, not measured."""
TAU_VARIANCE = 0.437
"""Variance of atanh(tau), which is nearly normal, times n - 4 for n candidates (Fieller, Hartley and Pearson
1957); not measured here."""


class _Evaluation:
    """An evaluation with the candidates that have come to it. Shapes: N candidates."""

    def __init__(self, milestone: int, trials: Sequence[TrialRecord]) -> None:
        """The evaluation of this number, of candidates by one schedule."""
        self._there = [trial for trial in trials if len(trial.result.curve) >= milestone]
        self._number_N = np.array([trial.number for trial in self._there])
        self._log_flops_N = np.array([_log_flops(trial) for trial in self._there])
        self._ne_N = np.array([best_ne(trial, milestone) for trial in self._there])
        self._milestone = milestone

    def ahead_of(self, candidate: TrialRecord) -> tuple[list[TrialRecord], int]:
        """Those that were no worse than the candidate, and the number of those that it is compared with: others
        nearest in log FLOPs, with all that are as near as the last of them."""
        distance_N = np.abs(self._log_flops_N - _log_flops(candidate))
        distance_N[self._number_N == candidate.number] = np.inf
        farthest = np.sort(distance_N)[:NEIGHBOURS][-1:]
        near_N = np.isfinite(distance_N) & (distance_N <= farthest)
        ne = best_ne(candidate, self._milestone)
        return [self._there[place] for place in np.flatnonzero(near_N & (self._ne_N <= ne))], int(
            near_N.sum()
        )


def judge(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """Stops a candidate that is behind similar ones at its rung; a `search.stopping.base.Judge`."""
    from search.stopping.forecast import forecast

    seen = len(candidate.result.curve)
    others = like(candidate, trials)
    finished = went_on(seen, others)
    if len(finished) < FEWEST or not _is_rung(seen, others):
        return None
    ahead, compared = _Evaluation(seen, others).ahead_of(candidate)
    if _goes_on(candidate, ahead, compared):
        return None
    ne = best_ne(candidate, seen)
    best = min(_no_dearer(candidate, ahead), key=lambda trial: best_ne(trial, seen))
    return Stop(
        f"stopped at {candidate.result.curve[-1].examples:,} examples: NE {ne:.5f} is number {len(ahead) + 1} "
        f"there of {compared + 1} of like FLOPs, of which the best third goes on; trial {best.number} had "
        f"{best_ne(best, seen):.5f} with no more FLOPs",
        forecast(candidate, finished).ne,
    )


def going_on(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The stopped candidate that goes on next: the one nearest to its end among those that have come to be among
    the best third at their rung, of these the first by NE; a `search.stopping.base.Continuation`."""
    trained = own(trials)
    stopped = [trial for trial in trained if trial.result.outcome is Outcome.STOPPED]
    places = {(schedule_of(trial), len(trial.result.curve)) for trial in stopped}
    for schedule, seen in sorted(places, key=lambda place: -place[1]):
        there = _Evaluation(seen, [trial for trial in trained if schedule_of(trial) == schedule])
        here = (t for t in stopped if (schedule_of(t), len(t.result.curve)) == (schedule, seen))
        found = [trial for trial in here if _goes_on(trial, *there.ahead_of(trial))]
        if found:
            return min(found, key=lambda trial: (best_ne(trial, seen), trial.number))
    return None


def tau_at(milestone: int, trials: Sequence[TrialRecord]) -> tuple[float, float]:
    """Kendall's tau between the lowest NE up to a milestone and the NE at the end, over trials that went on, and
    the lower end of its interval; NaN where they are too few or all alike."""
    from scipy.stats import kendalltau

    finished = went_on(milestone, trials)
    if len(finished) < FEWEST:
        return math.nan, math.nan
    ends = [ne_of(trial) for trial in finished]
    tau = float(kendalltau([best_ne(trial, milestone) for trial in finished], ends)[0])
    within = min(max(tau, -1.0 + 1e-9), 1.0 - 1e-9)
    return tau, math.tanh(math.atanh(within) - QUANTILE * math.sqrt(TAU_VARIANCE / (len(finished) - 4)))


def _is_rung(milestone: int, others: Sequence[TrialRecord]) -> bool:
    first = next((seen for seen in range(1, milestone + 1) if tau_at(seen, others)[1] >= LEAST_TAU), None)
    if first is None:
        return False
    rung = first
    while rung < milestone:
        rung *= REDUCTION
    return rung == milestone


def _goes_on(candidate: TrialRecord, ahead: Sequence[TrialRecord], compared: int) -> bool:
    return len(ahead) < math.ceil((compared + 1) / REDUCTION) or not _no_dearer(candidate, ahead)


def _no_dearer(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [trial for trial in trials if (trial.job.flops or 0.0) <= (candidate.job.flops or 0.0)]


def _log_flops(trial: TrialRecord) -> float:
    return math.log(max(trial.job.flops or 0.0, 1.0))
