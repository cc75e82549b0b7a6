"""The one scheduler: it fills free places with activities, watches them, and lets their work say what follows.

Trials of a study, retrainings of winners, the paper's tables, scorings and single trainings are all work for it.
It knows nothing of records, samplers or ledgers; `Work` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Generic, Protocol, TypeVar

from search.execution.running import Activity, look
from trials.runtime.launcher import POLL_SECONDS

A = TypeVar("A", bound=Activity)


class NotNow(Enum):
    """The type of `NOT_NOW`."""

    NOT_NOW = "not now"


NOT_NOW = NotNow.NOT_NOW
"""What work yields that has nothing to begin now, and may have later."""


class Work(Protocol[A]):
    """Activities that a scheduler begins, and what follows their ends."""

    def begin(self) -> Iterator[A | NotNow | None]:
        """Begins one activity per item, as late as there is a place for it.

        None stands for something that was settled without processes: the scheduler looks at running activities
        before it asks for the next, so that what is begun next knows of all that has ended. `NOT_NOW` stands for
        nothing at all: there may be something after the next look.
        """

    def has_room(self) -> bool:
        """Whether anything more may begin, as far as this work can tell; free places are the scheduler's
        matter."""

    def heard(self, activity: A) -> bool:
        """Takes in what an activity said; says whether that has ended it (a training that is given up)."""

    def ended(self, activity: A) -> Iterable[A]:
        """Takes in the end of an activity; returns, one by one, what begins in its place at once, such as its next
        attempt."""

    def looked(self) -> None:
        """Is called after every look at all activities, about ten times per second."""


class Scheduler(Generic[A]):
    """Runs activities side by side."""

    def __init__(self, places: int, poll_seconds: float = POLL_SECONDS, *, ranks: int | None = None) -> None:
        """A scheduler.

        Args:
            places: the largest number of activities at the same time.
            poll_seconds: seconds between two looks at them.
            ranks: the largest number of their ranks together, where they differ in them; what needs more than are
                free waits for its turn, while others go on and a few more begin.
        """
        self._places, self._poll_seconds, self._ranks = places, poll_seconds, ranks
        self._overtaken: dict[int, int] = {}
        """How many activities came after each one that waits, by its identity."""
        self.running: list[A] = []
        """Activities that go on or wait for places; after an interruption those that the interruption has
        ended."""

    def run(self, work: Work[A]) -> None:
        """Works off all of `work`. Whatever goes wrong meanwhile, Ctrl-C included, ends all processes first."""
        self.running.clear()
        upcoming = work.begin()
        try:
            while True:
                began = self._fill(upcoming, work)
                self._begin_what_fits()
                if began is False and not self.running:
                    return
                self._look(work, 0.0 if began is True else self._poll_seconds)
        except BaseException:
            for activity in self.running:
                activity.run.kill()
            raise

    def _fill(self, upcoming: Iterator[A | NotNow | None], work: Work[A]) -> bool | NotNow:
        """Takes up one activity at most, and not several at once: see `Work.begin`. Says whether it did, or has to
        ask again."""
        if not self._has_place() or not work.has_room():
            return False
        try:
            activity = next(upcoming)
        except StopIteration:
            return False
        if activity is NOT_NOW:
            return NOT_NOW
        if activity is not None:
            self._overtaken = {
                id(waiting): self._overtaken.get(id(waiting), 0) + 1 for waiting in self._waiting
            }
            self.running.append(activity)
        return True

    def _has_place(self) -> bool:
        """Tells whether one more may be taken up, whatever number of ranks it will turn out to have."""
        if len(self.running) - len(self._waiting) >= self._places:
            return False
        # what waits must not starve: as many as there are places may overtake it, then all others wait for it
        if any(self._overtaken.get(id(waiting), 0) >= self._places for waiting in self._waiting):
            return False
        return self._ranks is None or self._ranks_in_use < self._ranks

    def _begin_what_fits(self) -> None:
        """Begins the activities whose ranks have places, those that wait longest first. What has more ranks than
        there are places goes on alone."""
        for activity in self._waiting:
            in_use, begun = self._ranks_in_use, len(self.running) - len(self._waiting)
            fits = self._ranks is None or (
                begun < self._places and in_use + activity.run.ranks <= self._ranks
            )
            if fits or not begun:
                activity.run.begin()

    @property
    def _waiting(self) -> list[A]:
        return [activity for activity in self.running if not activity.run.begun]

    @property
    def _ranks_in_use(self) -> int:
        return sum(activity.run.ranks for activity in self.running if activity.run.begun)

    def _look(self, work: Work[A], seconds: float) -> None:
        for activity in look(list(self.running), seconds):
            # `heard` comes first: what a rule gives up at an earlier evaluation is given up, though it has ended
            if work.heard(activity) or activity.run.ended:
                self.running.remove(activity)
                # each is known here before the next may fail to begin
                for next_activity in work.ended(activity):
                    self.running.append(next_activity)
                    self._begin_what_fits()  # before anything else takes the place
        work.looked()
