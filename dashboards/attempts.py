"""How each trial was held: the plan, why nothing less would do, what was tried, predicted and measured peaks.

Data for a table of the report; a row per trial that was planned, for a study in which plain DP did not do for all.
"""

from __future__ import annotations

from dashboards.sentences.summary import IN_WORDS
from dashboards.units import byte_size, word
from trials.record import Attempt, Outcome, PlanSummary, TrialRecord
from trials.study_record import StudyRecord

COLUMNS = ("Trial", "Planned", "Why nothing less", "Tried", "Executed", "Predicted peak", "Measured peak")
TEXT_COLUMNS = COLUMNS[1:5]
"""Columns that are no numbers."""
MOST_REASONS = 4
"""Ways to hold the model of which a row says what they lack."""
PLAIN_DP = "dp"


def attempt_rows(record: StudyRecord) -> list[tuple[str, ...]]:
    """The cells of the table, a row per planned trial; none where plain DP did for all at the first attempt."""
    trials = [trial for trial in record.trials if trial.first_plan is not None]
    return [_cells(trial) for trial in trials] if any(map(_needs_telling, trials)) else []


def _needs_telling(trial: TrialRecord) -> bool:
    assert trial.first_plan is not None
    plan = trial.first_plan
    return plan.strategy != PLAIN_DP or len(trial.attempts) > 1 or plan.forced or bool(plan.other_shapes)


def _cells(trial: TrialRecord) -> tuple[str, ...]:
    plan = trial.first_plan
    assert plan is not None
    last = trial.attempts[-1] if trial.attempts else None
    # the shape is told where the trial has gone through more than one, by its plan or by its attempts
    shapes = {attempt.plan.ranks for attempt in trial.attempts if attempt.plan is not None}
    several = bool(plan.other_shapes) or len(shapes) > 1
    planned = f"{plan.strategy or ''}{_on_ranks(plan, told=several)}" if plan.fits else "nothing fits"
    return (
        str(trial.number),
        planned,
        " ".join(filter(None, (*plan.other_shapes, why_nothing_less(plan)))),
        "; then ".join(f"{_told(attempt, in_shape=several)}" for attempt in trial.attempts),
        word(last.executed if last else None),
        byte_size(last.predicted_bytes if last else plan.peak_bytes),
        byte_size(last.measured_bytes if last else None),
    )


def why_nothing_less(plan: PlanSummary) -> str:
    """What each way to hold the model lacks that has no more techniques than the plan's, those nearest first."""
    lacking: dict[str, int] = {}
    for rejected in plan.rejected:
        if rejected.lacking_bytes:
            least = lacking.get(rejected.held_as, rejected.lacking_bytes)
            lacking[rejected.held_as] = min(rejected.lacking_bytes, least)
    nearest_first = sorted(lacking.items(), key=lambda item: item[1])
    told = [f"{held_as} lacks {byte_size(count)}" for held_as, count in nearest_first[:MOST_REASONS]]
    if len(nearest_first) > MOST_REASONS:
        told.append(f"{len(nearest_first) - MOST_REASONS} more lack more")
    return ", ".join(told)


def _on_ranks(plan: PlanSummary | None, *, told: bool) -> str:
    return f" on {plan.ranks}" if told and plan is not None and plan.ranks is not None else ""


def _told(attempt: Attempt, *, in_shape: bool) -> str:
    name = f"{attempt.strategy}{_on_ranks(attempt.plan, told=in_shape)}"
    outcome = IN_WORDS[attempt.outcome]
    if attempt.outcome is Outcome.OUT_OF_MEMORY and attempt.needed_bytes and attempt.limit_bytes:
        needed, limit = byte_size(attempt.needed_bytes), byte_size(attempt.limit_bytes)
        return f"{name}: {outcome} ({needed} of {limit})"
    happened = "; ".join(filter(None, (attempt.replaced, attempt.slow_rank)))
    return f"{name}: {outcome} ({happened})" if happened else f"{name}: {outcome}"
