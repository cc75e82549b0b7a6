"""What goes on in processes of their own: a training or a scoring, and a look at several of them at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from typing import Protocol, TypeVar

from dhen.errors import UserError
from search.execution.reduce_events import absorb, attempted
from trials.events import Event, Failed, Progress, Scored, Timed
from trials.job import Job
from trials.processes.launcher import POLL_SECONDS, AnyRun, wait_for
from trials.record import Metrics, TrialRecord
from trials.serving_limits import ForwardTime

E = TypeVar("E", bound=Event)


class Activity(Protocol):
    """Something that goes on in a process of its own."""

    run: AnyRun

    def take(self, events: list[Event]) -> None:
        """What the process has said since the last time."""


class Training:
    """A trial that trains: its record grows with what its process says."""

    def __init__(
        self, record: TrialRecord, job: Job, run: AnyRun, began: float, *, counted: bool, planned_here: bool
    ) -> None:
        """`began` as `time.monotonic` had it before the processes were asked for.

        `counted`: whether the peak they tell is of tensors, as the planner predicts it. `planned_here`:
        whether the record's plan is for what they run on.
        """
        self.record, self.job, self.run = record, job, run
        self.progress: Progress | None = None
        self._began, self._comparable = began, {"counted": counted, "planned_here": planned_here}

    def take(self, events: list[Event]) -> None:
        """See `Activity`; the end of the process gives the record its wall clock."""
        for event in events:
            if isinstance(event, Progress):
                self.progress = event
            else:
                self.record = absorb(self.record, event)
                self.record = attempted(self.record, event, self._seconds(), **self._comparable)
        if self.run.ended:
            self.record = self._timed(self.record)

    def stop(self, stopped: TrialRecord) -> TrialRecord:
        """Ends the processes; this record of the stopped trial with the attempt and its wall clock."""
        self.run.kill()
        return self._timed(attempted(stopped, None, self._seconds(), **self._comparable))

    def _timed(self, record: TrialRecord) -> TrialRecord:
        before = sum(attempt.seconds or 0.0 for attempt in record.attempts[:-1])
        return record.replace(seconds=before + self._seconds())

    def _seconds(self) -> float:
        return time.monotonic() - self._began


class _Asked:
    """A process that is to give one answer."""

    def __init__(self, run: AnyRun) -> None:
        self.run = run
        self._said: list[Event] = []

    def take(self, events: list[Event]) -> None:
        """See `Activity`."""
        self._said += events

    def _answer(self, kind: type[E]) -> E | None:
        """None where there is none."""
        return next((event for event in self._said if isinstance(event, kind)), None)

    @property
    def _reasons(self) -> str:
        """Why there is none."""
        return "; ".join(event.error for event in self._said if isinstance(event, Failed))


class Scoring(_Asked):
    """A trained trial that is scored on a split."""

    def __init__(self, record: TrialRecord, job: Job, split: str, run: AnyRun) -> None:
        super().__init__(run)
        self.record, self.job = record, job
        self._split = split

    @property
    def killed(self) -> bool:
        """Whether the process was ended from outside before it said anything."""
        return any(isinstance(event, Failed) and event.killed for event in self._said)

    @property
    def metrics(self) -> Metrics:
        """Once the process has ended.

        Raises:
            UserError: where it ended without a result.
        """
        scored = self._answer(Scored)
        if scored is not None:
            return scored.metrics
        raise UserError(
            f"trial {self.record.number} could not be scored on {self._split}: {self._reasons}. "
            "What was trained is safe; the same command scores again."
        )


class Timing(_Asked):
    """A model whose forward pass is measured."""

    @property
    def forward(self) -> ForwardTime:
        """Once the process has ended.

        Raises:
            UserError: where it ended without a result.
        """
        timed = self._answer(Timed)
        if timed is not None:
            return timed.forward
        raise UserError(f"its forward time could not be measured: {self._reasons}")


A = TypeVar("A", bound=Activity)


def look(activities: Collection[A], seconds: float = POLL_SECONDS) -> list[A]:
    """Hands each activity what its process has said, after a moment's wait for one of them to end.

    Returns those that had anything to hear; one whose `run.ended` is true has heard everything.
    """
    wait_for([activity.run for activity in activities], seconds)
    heard = []
    for activity in activities:
        events = activity.run.new_events()
        if events or activity.run.ended:
            activity.take(events)
            heard.append(activity)
    return heard


@contextlib.contextmanager
def killed_on_error(activities: Collection[Activity]) -> Iterator[None]:
    """Whatever goes wrong here, Ctrl-C included, ends the processes too."""
    try:
        yield
    except BaseException:
        for activity in activities:
            activity.run.kill()
        raise
