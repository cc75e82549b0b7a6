"""A trial's record after what its processes said: events become the curve, the outcome, the measurements."""

from __future__ import annotations

from types import NoneType
from typing import NamedTuple

from trials.records.events import (
    DivergenceEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    TrainingEvent,
    WrapEvent,
)
from trials.records.strategy import Strategy
from trials.records.trial_record import DRIVER_DIED, Attempt, Outcome, TrialRecord

MOST_HOSTS_LOST = 10
"""Number of times that a candidate is tried again because a host of it has left; then it may be what ends them."""


class AttemptContext(NamedTuple):
    """What an attempt was asked to be, and whether its numbers compare with its plan."""

    strategy: Strategy
    """How the ranks were asked to hold the model."""
    counted: bool
    """Whether the peak is of tensors, as the planner predicts it, not of a whole process."""
    planned_here: bool
    """Whether the record's plan is for the ranks that it runs on."""
    replaced: tuple[str, ...] = ()
    """What became of processes that were started anew while it went on."""
    slow: tuple[str, ...] = ()
    """Which ranks were slow, and what came of it."""


def cut_short(record: TrialRecord) -> TrialRecord:
    """A trial as it stands once its driver is gone: a running one will run again."""
    if record.result.outcome is not Outcome.RUNNING:
        return record
    return record.with_result(outcome=Outcome.INTERRUPTED, seconds=None)


def without_driver(record: TrialRecord, strategy: Strategy, driver: str) -> TrialRecord:
    """A running trial whose driver died: cut short, with the attempt that was under way, so that its next one
    goes on."""
    attempt = Attempt(
        strategy=strategy.name,
        outcome=Outcome.INTERRUPTED,
        predicted_bytes=None,
        error=f"{DRIVER_DIED} ({driver})",
    )
    return cut_short(record).replace(attempts=(*record.attempts, attempt))


def reduce_event(record: TrialRecord, event: Event) -> TrialRecord:
    """The record after one event; events that say nothing of the result leave it as it is."""
    if isinstance(event, WrapEvent):
        return record.with_result(technique=event.strategy)
    unseen = record.job.refit is None  # else validation was trained on, and says nothing
    if isinstance(event, EvaluationEvent):
        return record.with_result(curve=(*record.result.curve, event.point)) if unseen else record
    if isinstance(event, TrainingEvent):
        validation = event.best if unseen else None
        return record.with_result(outcome=Outcome.COMPLETED, validation=validation, measured=event.measured)
    if isinstance(event, DivergenceEvent):
        error = f"the loss was {event.loss} at step {event.step}"
        return record.with_result(outcome=Outcome.DIVERGED, error=error)
    if isinstance(event, FailureEvent):
        if event.needed_bytes and event.limit_bytes:
            record = record.with_plan(memory_excess=event.needed_bytes / event.limit_bytes - 1.0)
        return record.with_result(outcome=_outcome_of(event, record), error=event.error)
    return record


def with_attempt(
    record: TrialRecord,
    event: Event | None,
    seconds: float,
    context: AttemptContext,
) -> TrialRecord:
    """The record with the attempt that this event has ended; other events leave the record as it is.

    Args:
        record: the record after the event (`reduce_event`).
        event: the event that ended the attempt; None for an attempt that was stopped.
        seconds: wall clock of the attempt.
        context: what the attempt was asked to be.
    """
    if not isinstance(event, (TrainingEvent, DivergenceEvent, FailureEvent, NoneType)):
        return record
    as_planned = context.planned_here and context.strategy.name == record.plan.technique
    measured = event.measured if isinstance(event, TrainingEvent) else None
    attempt = Attempt(
        strategy=context.strategy.name,
        executed=record.result.technique,
        plan=record.plan.summary if as_planned else None,
        outcome=record.result.outcome,
        predicted_bytes=record.plan.peak_bytes if as_planned else None,
        measured_bytes=measured.peak_memory_bytes if measured and context.counted else None,
        predicted_step_seconds=record.plan.step_seconds if as_planned else None,
        measured_step_seconds=measured.step_ms / 1000.0 if measured and measured.step_ms else None,
        needed_bytes=event.needed_bytes if isinstance(event, FailureEvent) else None,
        limit_bytes=event.limit_bytes if isinstance(event, FailureEvent) else None,
        seconds=seconds,
        evaluations=len(record.result.curve) if record.result.outcome is Outcome.STOPPED else None,
        error=record.result.error,
        replaced="; ".join(context.replaced) or None,
        slow_rank="; ".join(context.slow) or None,
    )
    return record.replace(attempts=(*record.attempts, attempt))


def _outcome_of(event: FailureEvent, record: TrialRecord) -> Outcome:
    """The outcome of a failure: an attempt that was killed or stopped from outside is cut short and runs again;
    killed twice, it counts as out of memory. Hosts that leave are another matter, until they do so again and
    again, and so are servers of tables, whose memory no other strategy of the ranks changes.

    Tools in place of the kernel (earlyoom, systemd-oomd) send the same signal, and the kernel does not count it.
    An attempt whose driver died says nothing of memory, nor does one that was moved because a rank was slow.
    """
    if event.slow:
        return Outcome.INTERRUPTED
    interrupted = sum(
        attempt.outcome is Outcome.INTERRUPTED and not (attempt.lost_its_driver or attempt.was_moved)
        for attempt in record.attempts
    )
    elsewhere = event.host_left or event.of_server
    if event.killed and interrupted < (MOST_HOSTS_LOST if elsewhere else 1):
        return Outcome.INTERRUPTED
    if event.stopped and not interrupted:
        return Outcome.INTERRUPTED
    if event.of_server:
        return Outcome.FAILED
    return Outcome.OUT_OF_MEMORY if event.out_of_memory or event.killed else Outcome.FAILED
