"""The one scheduler: it fills free places with activities, watches them, and asks their work what follows.

Trials of a study, retrainings of winners, the paper's tables, scorings and single trainings are all work for it.
It knows nothing of records, samplers or ledgers; the functions that `Scheduler.run` is given do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from search.execution.running import Activity, look
from trials.runtime.launcher import POLL_SECONDS

A = TypeVar("A", bound=Activity)


class NotNow(Enum):
    """The type of `NOT_NOW`."""

    NOT_NOW = "not now"


NOT_NOW = NotNow.NOT_NOW
"""What work yields that has nothing to begin now, and may have after the next look."""


class Scheduler(Generic[A]):
    """Runs activities side by side."""

    def __init__(self, places: int, poll_seconds: float = POLL_SECONDS, *, ranks: int | None = None) -> None:
        """A scheduler.

        Args:
            places: the largest number of activities at the same time.
            poll_seconds: seconds between two looks at them.
            ranks: the largest number of their ranks together, if they differ in them; what needs more than are
                free waits for its turn, while others go on and a few more begin.
        """
        self._places, self._poll_seconds, self._ranks = places, poll_seconds, ranks
        self._overtaken: dict[int, int] = {}
        """How many activities came after each one that waits, by its identity."""
        self.running: list[A] = []
        """Activities that go on or wait for places; after an interruption those that the interruption has
        ended."""

    def run(
        self,
        upcoming: Iterator[A | NotNow | None],
        ended: Callable[[A], Iterable[A]],
        *,
        on_events: Callable[[A], bool] = lambda activity: False,
        on_poll: Callable[[], None] = lambda: None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """Works off all that comes up. Whatever goes wrong meanwhile, Ctrl-C included, ends all processes first.

        Args:
            upcoming: begins one activity per item, as late as there is a place for it. None stands for something
                that was settled without processes: the scheduler looks at running activities before it asks for
                the next, so that what is begun next knows of all that has ended. `NOT_NOW` stands for nothing.
            ended: takes in the end of an activity; returns, one by one, what begins in its place at once, such as
                its next attempt.
            on_events: takes in an activity's new events; returns whether they have ended it (a training that is
                given up).
            on_poll: is called after every look at all activities, about ten times per second.
            has_room: whether anything more may begin, as far as the work can tell; free places are the scheduler's
                matter.
        """
        self.running.clear()
        try:
            while True:
                # one activity at most, and not several at once: see `upcoming`
                begun: A | NotNow | None = NOT_NOW
                over = not self._has_place() or not has_room()
                if not over:
                    try:
                        begun = next(upcoming)
                    except StopIteration:
                        over = True
                if begun is not NOT_NOW and begun is not None:
                    self._overtaken = {
                        id(waiting): self._overtaken.get(id(waiting), 0) + 1 for waiting in self._waiting
                    }
                    self.running.append(begun)
                self._begin_what_fits()
                if over and not self.running:
                    return
                for activity in look(list(self.running), self._poll_seconds if begun is NOT_NOW else 0.0):
                    # `heard` first: what a rule gives up at an earlier evaluation is given up, though it has ended
                    if on_events(activity) or activity.run.ended:
                        self.running.remove(activity)
                        # each is known here before the next may fail to begin
                        for next_activity in ended(activity):
                            self.running.append(next_activity)
                            self._begin_what_fits()  # before anything else takes the place
                on_poll()
        except BaseException:
            for activity in self.running:
                activity.run.kill()
            raise

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
