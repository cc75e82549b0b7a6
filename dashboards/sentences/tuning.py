"""What tuning the best architectures' training again has brought, in a sentence."""

from __future__ import annotations

from dashboards.names import short_name
from dashboards.rows import find
from dashboards.units import decimals, known, percent
from trials.record import Outcome, StudyRecord, TrialRecord, relative_ne_percent


def tuned(record: StudyRecord) -> str | None:
    """Of each architecture its first NE and the lowest it was tuned to; None where none was tuned."""
    by_first: dict[int, list[TrialRecord]] = {}
    for trial in record.candidates:
        if trial.tuned_from is not None:
            by_first.setdefault(trial.tuned_from, []).append(trial)
    said = (_gain(find(record, first), trials) for first, trials in by_first.items())
    joined = "; ".join(each for each in said if each)
    return f"Training settings tuned again: {joined}." if joined else None


def _gain(first: TrialRecord | None, trials: list[TrialRecord]) -> str | None:
    done = [(ne, trial.number) for trial in trials if (ne := _ne(trial)) is not None]
    before = _ne(first)
    if first is None or before is None or not done:
        return None
    ne, number = min(done)
    count = f"{len(trials)} trial" + "s" * (len(trials) > 1)
    about = f"trial {first.number} ({short_name(first.model)})"
    if ne >= before:
        return f"{about} stays at NE {decimals(before, 5)} ({count}, none better)"
    relative = percent(relative_ne_percent(ne, before))
    return f"{about} from NE {decimals(before, 5)} to {decimals(ne, 5)} ({relative}, trial {number}; {count})"


def _ne(trial: TrialRecord | None) -> float | None:
    """Of one that completed."""
    if trial is None or trial.outcome is not Outcome.COMPLETED or trial.validation is None:
        return None
    return trial.validation.ne if known(trial.validation.ne) else None
