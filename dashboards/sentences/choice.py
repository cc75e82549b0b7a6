"""Why the best is the best, how much of its NE is luck, and which winners were chosen, in words."""

from __future__ import annotations

from dashboards.names import trial_name
from dashboards.rows import find
from dashboards.units import decimals, percent, ratio
from trials.study_record import StudyRecord

NO_OPTIMISM_PERCENT = 0.005
"""Percent of NE that are shown as 0.00."""


def noise(record: StudyRecord) -> str | None:
    """Returns what choosing the lowest of several makes of its NE; None where it is not known, or nothing."""
    choice = record.choice
    if choice is None or not choice.judged or choice.compared < 2:
        return None
    if choice.optimism_percent < NO_OPTIMISM_PERCENT:
        return None
    return (
        f"Choosing the lowest NE of {choice.compared} makes it look about {_size(choice.optimism_percent)} "
        f"lower on validation than it is, by the spread over blocks of rows."
    )


def best_not_lowest(record: StudyRecord) -> str | None:
    """Why the best is not the lowest NE; None where it is, or no choice was made."""
    choice = record.choice
    if choice is None or choice.best == choice.lowest:
        return None
    best, lowest = find(record, choice.best), find(record, choice.lowest)
    judged, other = choice.of(choice.best), choice.of(choice.lowest)
    if best is None or lowest is None or judged is None or other is None:
        return None
    merits = []
    if other.worse_periods > judged.worse_periods:
        merits.append(
            f"it is worse than the baseline in {judged.worse_periods} of {choice.periods} periods, the lowest in "
            f"{other.worse_periods}"
        )
    if (best.job.flops or 0.0) < (lowest.job.flops or 0.0):
        merits.append(f"it has {ratio((best.job.flops or 0.0) / (lowest.job.flops or 1.0))} the FLOPs")
    periods = "an earlier period" if choice.origins == 1 else f"{choice.origins} earlier periods"
    where = f"validation and {periods}" if choice.origins else "validation"
    is_baseline = choice.best == choice.baseline
    why = "" if is_baseline or not merits else f", and {' and '.join(merits)}"
    return (
        f"The lowest NE on {where} is that of trial {lowest.number} ({trial_name(lowest)}): "
        f"{'the baseline' if is_baseline else f'trial {best.number}'} is worse by {_size(judged.percent)} "
        f"(standard error {_size(judged.standard_error)}), which is within the noise of choosing{why}."
    )


def baseline_is_best(record: StudyRecord) -> str:
    """Says that the baseline is the best, in place of the sentence that compares the best with it."""
    choice, baseline = record.choice, record.trial(record.baseline or 0)
    assert choice is not None
    ne = decimals(baseline.result.validation.ne if baseline.result.validation else None, 5)
    name = f"trial {baseline.number} ({trial_name(baseline)})"
    about = f"the best is the baseline itself, {name}, NE {ne} on validation"
    if choice.lowest == choice.baseline:
        return f"None is better than the tuned baseline: {about}."
    beyond = f"beyond what choosing among {choice.compared} explains"
    return f"None is better than the tuned baseline {beyond}: {about}."


def winners_chosen(record: StudyRecord) -> str | None:
    """Which winners are scored on test, and what for; None before they are chosen."""
    if record.choice is None or not record.choice.winners:
        return None
    named = "; ".join(
        f"trial {winner.trial} ({', '.join(winner.reasons)})" for winner in record.choice.winners
    )
    return f"Chosen before test was looked at, and scored there beside the baseline: {named}."


def reasons(record: StudyRecord, number: int) -> str:
    """What a winner was chosen as, in words; empty where none was chosen."""
    winners = record.choice.winners if record.choice else ()
    return next((", ".join(winner.reasons) for winner in winners if winner.trial == number), "")


def _size(value: float) -> str:
    return percent(value).lstrip("+")
