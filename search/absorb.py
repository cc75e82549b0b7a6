"""A trial's record after what its process said: events become the curve, the outcome, the measurements."""

from __future__ import annotations

from trials.events import Diverged, Evaluated, Event, Failed, Trained
from trials.record import Outcome, TrialRecord

TECHNIQUE = "dp"
"""One process, nothing sharded: the empty set of memory techniques."""


def cut_short(record: TrialRecord) -> TrialRecord:
    """A trial as it stands once its driver is gone: it will run again."""
    if record.outcome is not Outcome.RUNNING:
        return record
    return record.model_copy(update={"outcome": Outcome.INTERRUPTED, "seconds": None})


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
                "executed_technique": TECHNIQUE,
            }
        )
    if isinstance(event, Diverged):
        error = f"the loss was {event.loss} at step {event.step}"
        return record.model_copy(update={"outcome": Outcome.DIVERGED, "error": error})
    if isinstance(event, Failed):
        outcome = Outcome.OUT_OF_MEMORY if event.out_of_memory else Outcome.FAILED
        return record.model_copy(update={"outcome": outcome, "error": event.error})
    return record
