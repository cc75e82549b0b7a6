"""A trial's record after what its process said: events become the curve, the outcome, the measurements."""

from __future__ import annotations

from trials.events import Diverged, Evaluated, Event, Failed, Trained
from trials.record import Attempt, Outcome, TrialRecord


def cut_short(record: TrialRecord) -> TrialRecord:
    """A trial as it stands once its driver is gone: it will run again."""
    if record.outcome is not Outcome.RUNNING:
        return record
    return record.model_copy(update={"outcome": Outcome.INTERRUPTED, "seconds": None})


def attempted(record: TrialRecord, event: Event, seconds: float, *, counted: bool) -> TrialRecord:
    """The record with the training that this event has ended among its attempts; others leave it as it is.

    `counted`: whether its peak is of tensors, not of a whole process.
    """
    if not isinstance(event, (Trained, Diverged, Failed)):
        return record
    assert record.executed_technique is not None
    attempt = Attempt(
        strategy=record.executed_technique,
        outcome=record.outcome,
        predicted_bytes=record.predicted_peak_bytes,
        measured_bytes=event.peak_memory_bytes if counted and isinstance(event, Trained) else None,
        needed_bytes=event.needed_bytes if isinstance(event, Failed) else None,
        limit_bytes=event.limit_bytes if isinstance(event, Failed) else None,
        seconds=seconds,
        error=record.error,
    )
    return record.model_copy(update={"attempts": (*record.attempts, attempt)})


def absorb(record: TrialRecord, event: Event) -> TrialRecord:
    """The record after one event."""
    if isinstance(event, Evaluated):
        return record.model_copy(update={"curve": (*record.curve, event.point)})
    if isinstance(event, Trained):
        return record.model_copy(
            update={
                "outcome": Outcome.COMPLETED,
                "validation": event.best,
                "examples_per_second": event.examples_per_second,
                "step_ms": event.step_ms,
                "peak_memory_bytes": event.peak_memory_bytes,
                "train_seconds": event.train_seconds,
                "evaluate_seconds": event.evaluate_seconds,
            }
        )
    if isinstance(event, Diverged):
        error = f"the loss was {event.loss} at step {event.step}"
        return record.model_copy(update={"outcome": Outcome.DIVERGED, "error": error})
    if isinstance(event, Failed):
        outcome = Outcome.OUT_OF_MEMORY if event.out_of_memory else Outcome.FAILED
        changes: dict[str, object] = {"outcome": outcome, "error": event.error}
        if event.needed_bytes and event.limit_bytes:
            changes["memory_excess"] = event.needed_bytes / event.limit_bytes - 1.0
        return record.model_copy(update=changes)
    return record
