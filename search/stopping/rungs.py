"""Successive halving, asynchronous, among candidates of similar FLOPs (ASHA, arXiv 1810.05934).

Rungs are the evaluations 1, 3, 9 ...: at each a candidate is compared with those nearest in log FLOPs that
were there and have ended, stopped ones included, and goes on if it is among the best third. A candidate goes on as
well if none of them with no more FLOPs is ahead of it: it may be on the front.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from search.stopping.base import FEWEST, Stop, best_ne, like, went_on
from trials.record import Outcome, TrialRecord

REDUCTION = 3
"""Factor by which evaluations grow from rung to rung; one candidate of so many goes on. An assumption, not
measured."""
NEIGHBOURS = 11
"""Number of candidates of similar FLOPs that a candidate is compared with: an assumption, not measured. With the
candidate itself they are a multiple of `REDUCTION`."""


def judge(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> Stop | None:
    """Stops a candidate that is behind similar ones at its rung; a `search.stopping.base.Rule`."""
    from search.stopping.forecast import forecast

    rung = len(candidate.result.curve)
    others = like(candidate, trials)
    finished = went_on(rung, others)
    if not _is_rung(rung) or len(finished) < FEWEST:
        return None
    near = _nearest(candidate, [trial for trial in others if _was_there(trial, rung)])
    ne = best_ne(candidate, rung)
    ahead = [trial for trial in near if best_ne(trial, rung) <= ne]
    cheaper = [trial for trial in ahead if (trial.job.flops or 0.0) <= (candidate.job.flops or 0.0)]
    if len(ahead) < math.ceil((len(near) + 1) / REDUCTION) or not cheaper:
        return None
    best = min(cheaper, key=lambda trial: best_ne(trial, rung))
    return Stop(
        f"stopped at {candidate.result.curve[-1].examples:,} examples: NE {ne:.5f} is number {len(ahead) + 1} "
        f"there of {len(near) + 1} of like FLOPs, of which the best third goes on; trial {best.number} had "
        f"{best_ne(best, rung):.5f} with no more FLOPs",
        forecast(candidate, finished).ne,
    )


def _is_rung(milestone: int) -> bool:
    while milestone % REDUCTION == 0:
        milestone //= REDUCTION
    return milestone == 1


def _was_there(trial: TrialRecord, rung: int) -> bool:
    return trial.result.outcome in (Outcome.COMPLETED, Outcome.STOPPED) and len(trial.result.curve) >= rung


def _nearest(candidate: TrialRecord, trials: list[TrialRecord]) -> list[TrialRecord]:
    """Trials nearest to the candidate in log FLOPs; of equally near ones the earlier."""
    flops = math.log(max(candidate.job.flops or 0.0, 1.0))
    by_distance = sorted(
        trials, key=lambda trial: (abs(math.log(max(trial.job.flops or 0.0, 1.0)) - flops), trial.number)
    )
    return by_distance[:NEIGHBOURS]
