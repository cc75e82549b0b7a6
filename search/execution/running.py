"""What goes on in processes of its own, as the driver sees it: a training, a scoring, a measured forward pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from dhen.errors import UserError
from search.execution.reduce_events import AttemptContext, reduce_event, with_attempt
from search.execution.step_correction import StepCorrections
from trials.records.events import (
    Event,
    FailureEvent,
    Progress,
    ReplacementEvent,
    ScoreEvent,
    SlowRank,
    TrainingEvent,
)
from trials.records.job import Job
from trials.records.trial_record import Metrics, TrialRecord
from trials.runtime.launcher import AnyRun, wait_for
from trials.store.user_cache import DiskFullError

# A run whose processes begin when the scheduler has places for its ranks.


class LateRun:
    """A `trials.runtime.launcher.AnyRun` that begins when it is told to."""

    def __init__(self, start: Callable[[], AnyRun], ranks: int = 1) -> None:
        """`start` asks for the processes; `ranks` is the number of places that they take."""
        self.ranks = ranks
        self._start = start
        self._run: AnyRun | None = None
        self._began = 0.0
        self._given_up = False

    @property
    def begun(self) -> bool:
        """Whether the processes were asked for."""
        return self._run is not None

    @property
    def seconds(self) -> float:
        """Wall clock since the processes were asked for; what was waited for places before does not count."""
        return time.monotonic() - self._began if self.begun else 0.0

    def begin(self) -> None:
        """Asks for the processes.

        Raises:
            UserError: if this machine lacks what they need.
        """
        self._began = time.monotonic()
        self._run = self._start()

    @property
    def ended(self) -> bool:
        """See `AnyRun`; true too if it was given up before it began."""
        return self._given_up if self._run is None else self._run.ended

    @property
    def sentinels(self) -> list[int]:
        """See `AnyRun`; none while places are waited for."""
        return [] if self._run is None else self._run.sentinels

    def new_events(self) -> list[Event]:
        """See `AnyRun`; none while places are waited for."""
        return [] if self._run is None else self._run.new_events()

    def kill(self) -> None:
        """See `AnyRun`."""
        self._given_up = True
        if self._run is not None:
            self._run.kill()


LOG = logging.getLogger(__name__)


class Activity(Protocol):
    """Something that goes on in processes of its own."""

    run: LateRun

    def take(self, events: list[Event]) -> None:
        """Takes in what the processes have said since the last time."""


class Training:
    """A trial that trains: its record grows with what its processes say."""

    def __init__(
        self,
        record: TrialRecord,
        job: Job,
        run: LateRun,
        context: AttemptContext,
        corrections: StepCorrections | None = None,
    ) -> None:
        """A training whose processes a scheduler begins.

        Args:
            record: the trial as it begins this attempt.
            job: what is trained.
            run: the processes.
            context: what the attempt is asked to be.
            corrections: take what a step has taken, for later predictions.
        """
        self.record, self.job, self.run = record, job, run
        self.progress: Progress | None = None
        self._notices: list[str] = []
        self._context, self._corrections = context, corrections

    def take(self, events: list[Event]) -> None:
        """Takes in events; the end of the processes gives the record its wall clock."""
        for event in events:
            if isinstance(event, Progress):
                self.progress = event
            elif isinstance(event, ReplacementEvent):
                LOG.warning("trial %d: %s", self.record.number, event.words)
                self._context = self._context._replace(replaced=(*self._context.replaced, event.words))
            elif isinstance(event, SlowRank):
                LOG.warning("trial %d: %s", self.record.number, event.words)
                self._notices.append(event.words)
                self._context = self._context._replace(slow=(*self._context.slow, event.words))
            else:
                self.record = reduce_event(self.record, event)
                self.record = with_attempt(self.record, event, self._seconds(), self._context)
                if isinstance(event, TrainingEvent) and self._corrections is not None:
                    self._corrections.note(self.record)
        if self.run.ended:
            self.record = self._timed(self.record)

    def stop(self, stopped: TrialRecord) -> None:
        """Ends the processes; the record becomes this one of the stopped trial, with its attempt and wall
        clock."""
        self.run.kill()
        self.record = self._timed(with_attempt(stopped, None, self._seconds(), self._context))

    def take_notices(self) -> list[str]:
        """Returns the sentences for people since the last call."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def examples(self) -> int:
        """Training examples seen so far; all that it saw, once it has ended."""
        if self.run.ended and self.record.result.curve:
            return self.record.result.curve[-1].examples
        return self.progress.examples if self.progress else 0

    def _timed(self, record: TrialRecord) -> TrialRecord:
        before = sum(attempt.seconds or 0.0 for attempt in record.attempts[:-1])
        return record.with_result(seconds=before + self._seconds())

    def _seconds(self) -> float:
        return self.run.seconds


class Scoring:
    """A trained network that is scored on a split."""

    def __init__(self, record: TrialRecord, job: Job, split: str, run: LateRun) -> None:
        self.record, self.job, self.split, self.run = record, job, split, run
        self._said: list[Event] = []

    def take(self, events: list[Event]) -> None:
        """Keeps events until the end."""
        self._said += events

    @property
    def killed(self) -> bool:
        """Whether the processes were ended from outside before they said anything."""
        return any(isinstance(event, FailureEvent) and event.killed for event in self._said)

    @property
    def metrics(self) -> Metrics:
        """Metrics on the split, once the processes have ended.

        Raises:
            UserError: if they ended without a result.
        """
        for event in self._said:
            if isinstance(event, ScoreEvent):
                return event.metrics
        raise UserError(
            f"trial {self.record.number} could not be scored on {self.split}: {reasons(self._said)}. "
            "What was trained is safe; the same command scores again."
        )


A = TypeVar("A", bound=Activity)


def look(activities: Collection[A], seconds: float) -> list[A]:
    """Hands each activity what its processes have said, after waiting `seconds` at most for one of them to end.

    Returns the activities that had anything to hear; one whose `run.ended` is true has heard everything.
    """
    wait_for([activity.run for activity in activities], seconds)
    heard = []
    for activity in activities:
        events = new_events(activity.run)
        if events or activity.run.ended:
            activity.take(events)
            heard.append(activity)
    return heard


def new_events(run: AnyRun) -> list[Event]:
    """What a run's processes have said since the last time.

    Raises:
        DiskFullError: if processes ended for want of space for a file. They are cut short, not failed.
    """
    events = run.new_events()
    for event in events:
        if isinstance(event, FailureEvent) and event.disk_full:
            raise DiskFullError(event.error)
    return events


def reasons(said: list[Event]) -> str:
    """Why there is no answer."""
    return "; ".join(event.error for event in said if isinstance(event, FailureEvent))
