"""Predicted against measured: how far off plans were, by memory technique and in all.

An error is measured over predicted less one, in percent: above 0 it took more than was predicted. Attempts count
that ran on what they were planned for; a peak counts only where it was counted (`Attempt.measured_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dashboards.units import MISSING, known
from trials.record import Attempt, Outcome
from trials.study_record import StudyRecord

ALL = "all"
"""Name of the row for all techniques together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of one quantity; None where nothing is known."""

    count: int
    """Number of attempts in which the quantity was predicted and measured."""
    median: float | None
    """Median of the errors without their signs."""
    worst: float | None
    """The error farthest from 0, with its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow:
    """Errors of one technique."""

    technique: str
    """The technique as executed, or `all`."""
    attempts: int
    """Number of trainings, also of those without numbers to compare."""
    out_of_memory: int
    peak: Errors
    step: Errors


COLUMNS = (
    "Technique",
    "Attempts",
    "Out of memory",
    "Peaks compared",
    "Peak off, median",
    "Peak off, worst",
    "Steps compared",
    "Step off, median",
    "Step off, worst",
)
"""Titles of the columns of these rows, on the page and in the terminal."""


def cells(row: AccuracyRow) -> tuple[str, ...]:
    """A row of the table, under `COLUMNS`."""
    return (
        row.technique,
        str(row.attempts),
        str(row.out_of_memory or ""),
        *(text for errors in (row.peak, row.step) for text in _cells(errors)),
    )


def share(value: float | None) -> str:
    """An error without its sign: `2.1 %`."""
    return f"{value:,.{_digits(value)}f} %" if value is not None else MISSING


def signed(value: float | None) -> str:
    """An error with its sign: `+2.1 %`."""
    return f"{value:+,.{_digits(value)}f} %" if value is not None else MISSING


def _digits(percent: float) -> int:
    return 1 if abs(percent) < 100 else 0


def _cells(errors: Errors) -> tuple[str, str, str]:
    return str(errors.count or ""), share(errors.median), signed(errors.worst)


def accuracy(record: StudyRecord) -> tuple[AccuracyRow, ...]:
    """A row for each technique that was executed, those with most attempts first, then one for all.

    There is no row where nothing was trained.
    """
    attempts = [attempt for trial in record.trials for attempt in trial.attempts]
    by_technique: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_technique.setdefault(attempt.unsized_strategy, []).append(attempt)
    ordered = sorted(by_technique.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [_row(name, group) for name, group in ordered]
    return (*rows, _row(ALL, attempts)) if attempts else ()


def _row(technique: str, attempts: Sequence[Attempt]) -> AccuracyRow:
    return AccuracyRow(
        technique=technique,
        attempts=len(attempts),
        out_of_memory=sum(attempt.outcome is Outcome.OUT_OF_MEMORY for attempt in attempts),
        peak=_errors(attempts, lambda attempt: (attempt.predicted_bytes, attempt.measured_bytes)),
        step=_errors(
            attempts, lambda attempt: (attempt.predicted_step_seconds, attempt.measured_step_seconds)
        ),
    )


def _errors(
    attempts: Iterable[Attempt], values: Callable[[Attempt], tuple[float | None, float | None]]
) -> Errors:
    off = []
    for attempt in attempts:
        predicted, measured = values(attempt)
        if predicted and measured and known(predicted) and known(measured):
            off.append(100.0 * (measured / predicted - 1.0))
    if not off:
        return Errors(count=0, median=None, worst=None)
    return Errors(count=len(off), median=median(map(abs, off)), worst=max(off, key=abs))
