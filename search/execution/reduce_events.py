"""A trial's record after what its process said: events become the curve, the outcome, the measurements."""

from __future__ import annotations

from types import NoneType
from typing import TypeVar

from trials.events import Diverged, Evaluated, Event, Failed, Trained
from trials.record import Attempt, Outcome, TrialRecord

R = TypeVar("R", bound=TrialRecord)


def cut_short(record: R) -> R:
    """A trial as it stands once its driver is gone: it will run again."""
    if record.outcome is not Outcome.RUNNING:
        return record
    return record.replace(outcome=Outcome.INTERRUPTED, seconds=None)


def attempted(
    record: TrialRecord, event: Event | None, seconds: float, *, counted: bool, planned_here: bool
) -> TrialRecord:
    """The record with the training that this event has ended among its attempts; others leave it as it is.

    No event: it was stopped.

    `counted`: whether its peak is of tensors, not of a whole process. `planned_here`: whether its plan is for
    what it ran on, so that both can be compared.
    """
    if not isinstance(event, (Trained, Diverged, Failed, NoneType)):
        return record
    assert record.executed_technique is not None
    as_planned = planned_here and record.executed_technique == record.planned_technique
    trained = event if isinstance(event, Trained) else None
    attempt = Attempt(
        strategy=record.executed_technique,
        outcome=record.outcome,
        predicted_bytes=record.predicted_peak_bytes if as_planned else None,
        measured_bytes=trained.peak_memory_bytes if counted and trained else None,
        predicted_step_seconds=record.predicted_step_seconds if as_planned else None,
        measured_step_seconds=trained.step_ms / 1000.0 if trained else None,
        needed_bytes=event.needed_bytes if isinstance(event, Failed) else None,
        limit_bytes=event.limit_bytes if isinstance(event, Failed) else None,
        seconds=seconds,
        error=record.error,
    )
    return record.replace(attempts=(*record.attempts, attempt))


def absorb(record: TrialRecord, event: Event) -> TrialRecord:
    """The record after one event."""
    if isinstance(event, Evaluated):
        return record.replace(curve=(*record.curve, event.point))
    if isinstance(event, Trained):
        return record.replace(
            outcome=Outcome.COMPLETED,
            validation=event.best,
            examples_per_second=event.examples_per_second,
            step_ms=event.step_ms,
            peak_memory_bytes=event.peak_memory_bytes,
            train_seconds=event.train_seconds,
            evaluate_seconds=event.evaluate_seconds,
        )
    if isinstance(event, Diverged):
        error = f"the loss was {event.loss} at step {event.step}"
        return record.replace(outcome=Outcome.DIVERGED, error=error)
    if isinstance(event, Failed):
        changes: dict[str, object] = {"outcome": _how(record, event), "error": event.error}
        if event.needed_bytes and event.limit_bytes:
            changes["memory_excess"] = event.needed_bytes / event.limit_bytes - 1.0
        return record.replace(**changes)
    return record


def _how(record: TrialRecord, event: Failed) -> Outcome:
    """Killed from outside, a training is cut short and runs again; killed twice, it is as if memory were short.

    Tools in place of the kernel (earlyoom, systemd-oomd) send the same signal, and the kernel does not count it.
    """
    if event.killed and all(attempt.outcome is not Outcome.INTERRUPTED for attempt in record.attempts):
        return Outcome.INTERRUPTED
    return Outcome.OUT_OF_MEMORY if event.out_of_memory or event.killed else Outcome.FAILED
