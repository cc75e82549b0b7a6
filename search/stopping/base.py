"""What a stopping rule sees of a study, and what it says.

A rule judges a candidate at a milestone, its k-th evaluation on validation, by the candidates that have ended.
It goes by their records alone, so a resumed study decides as it would have decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search.pareto import eligible, own
from trials.record import Curve, Outcome, TrialRecord

FEWEST = 8
"""Number of candidates that have to go on from the milestone to their end before any is stopped there: an
assumption, not measured."""


@dataclass(frozen=True)
class Stop:
    """The decision that a candidate's training ends here."""

    reason: str
    expected_ne: float
    """Lowest NE that the candidate would have come to."""


Judge = Callable[[TrialRecord, Sequence[TrialRecord]], Stop | None]
"""A function of a candidate whose curve ends at the milestone, and of all trials of the study; it returns None
where the candidate goes on."""


def first_stop(
    judge: Judge, record: TrialRecord, judged: int, trials: Sequence[TrialRecord]
) -> TrialRecord | None:
    """The record as it ends at the first evaluation after `judged` ones where the rule stops it; else None.

    Evaluations are judged one by one, and what came after the one that decides is dropped: how many arrive
    at once depends on the moment, and decisions must not.
    """
    for seen in range(judged + 1, len(record.result.curve) + 1):
        so_far = record.with_result(curve=record.result.curve[:seen])
        stop = judge(so_far, trials) if _can_be_judged(so_far) else None
        if stop is not None:
            return so_far.with_result(
                outcome=Outcome.STOPPED,
                error=stop.reason,
                expected_ne=stop.expected_ne,
                validation=so_far.result.curve[_best(so_far.result.curve)].validation,
            )
    return None


def like(candidate: TrialRecord, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Other candidates that were trained and evaluated by the same schedule, each training once."""
    schedule = schedule_of(candidate)
    return [
        trial for trial in own(trials) if trial.number != candidate.number and schedule_of(trial) == schedule
    ]


def went_on(milestone: int, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that completed and were evaluated again after this milestone."""
    completed = eligible(trials)
    return [
        trial
        for trial in completed
        if len(trial.result.curve) > milestone and math.isfinite(best_ne(trial, milestone))
    ]


def best_ne(trial: TrialRecord, milestone: int) -> float:
    """Lowest NE of the evaluations up to the milestone; infinite where there is none."""
    values = trial.result.curve.ne[:milestone]
    return min((ne for ne in values if not math.isnan(ne)), default=math.inf)


def _best(curve: Curve) -> int:
    """The place of the evaluation with the lowest NE."""
    ne = curve.ne
    return min(range(len(ne)), key=lambda place: (math.isnan(ne[place]), ne[place]))


def _can_be_judged(record: TrialRecord) -> bool:
    """Whether the trial has an NE, and patience does not end it anyway, so that stopping saves something."""
    stale = len(record.result.curve) - 1 - _best(record.result.curve)
    patience: float = record.job.training.get("patience", math.inf)
    return stale < patience and math.isfinite(best_ne(record, len(record.result.curve)))


def schedule_of(trial: TrialRecord) -> tuple[object, ...]:
    """Settings of evaluation: evaluations of equal number are comparable where these settings are equal."""
    keys = ("epochs", "evaluate_every", "schedule", "train_fraction")
    return tuple(trial.job.training.get(key) for key in keys)
