"""Stragglers: ranks that take much longer for their part of the steps than others with the same part.

All others wait for such a rank in every step. What is compared is each rank's own time (`own_time`), over
stretches of steps: evaluations and checkpoints, in which the first rank has more to do, are left out. A rank
is slow if it took `TIMES` the median of the others, and half of the clock itself, in `INTERVALS` intervals
in a row: ranks that share cores with other programs, and tables that cannot be cut evenly, come to less.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from trials.records.events import SlowRank
from trials.records.strategy import Ranks, Strategy

INTERVAL_SECONDS = 2.0
"""Seconds of steps that are judged together, at least."""
INTERVALS = 3
"""Number of intervals in a row in which a rank must be slow."""
TIMES = 3.0
"""How many times as long as the others a slow rank takes."""
SHARE = 0.5
"""Share of the clock that a slow rank takes itself; with less, all ranks wait for the network."""
LEAST_SHARE = 0.01
"""Share of the clock that others are taken to need at least: they are measured no better."""


class Stragglers:
    """Judges the own times of all ranks, as they come."""

    def __init__(self, like: Sequence[int]) -> None:
        """`like` has a number for each rank; ranks with the same number have the same work."""
        self._like = like
        self._own = [0.0] * len(like)
        self._wall = 0.0
        self._began: int | None = None
        self._slow: dict[int, tuple[int, float, list[float]]] = {}
        """Examples at which each slow rank began to be slow, its seconds since, and how many times as long it
        took, in its intervals in a row."""

    def note(self, own: Sequence[float], wall: float, examples: int) -> list[SlowRank]:
        """Takes in what a stretch of steps took.

        Args:
            own: seconds that each rank took itself.
            wall: seconds by the clock.
            examples: training examples done when the stretch began.

        Returns:
            The ranks that are slow, if this stretch ends an interval that says so; one that stays slow is told
            again after as many intervals more.
        """
        if self._began is None:
            self._began = examples
        self._own = [before + more for before, more in zip(self._own, own, strict=True)]
        self._wall += wall
        if self._wall < INTERVAL_SECONDS:
            return []
        found = []
        for rank in range(len(self._like)):
            times = self._times(rank)
            if times is None:
                self._slow.pop(rank, None)
                continue
            since, seconds, intervals = self._slow.get(rank, (self._began, 0.0, []))
            seconds, intervals = seconds + self._wall, [*intervals, times]
            self._slow[rank] = since, seconds, intervals
            if len(intervals) % INTERVALS == 0:
                typical = statistics.median(intervals[-INTERVALS:])
                found.append(SlowRank(rank=rank, times=typical, examples=since, seconds=seconds))
        self._own, self._wall, self._began = [0.0] * len(self._like), 0.0, None
        return found

    def _times(self, rank: int) -> float | None:
        """Returns how many times as long as the others a rank took in this interval; None if it is not slow, or
        has no others to be compared with."""
        others = [
            own
            for other, own in enumerate(self._own)
            if other != rank and self._like[other] == self._like[rank]
        ]
        if not others or self._own[rank] < SHARE * self._wall:
            return None
        times = self._own[rank] / max(statistics.median(others), LEAST_SHARE * self._wall)
        return times if times >= TIMES else None


def like_ranks(ranks: Ranks, strategy: Strategy) -> list[int]:
    """Returns, for each rank, which others have the same work: those of its stage if there are pipelines, as
    stages differ in their layers; else all."""
    return [ranks._replace(rank=rank).stage(strategy.pipeline) for rank in range(ranks.world)]


# How long a rank takes itself, which is all the time but that in which it waits for others.
#
# By the clock all ranks take equally long, as each step has collectives in which the faster ones wait. Who waits
# there sleeps; so a rank's own time is what its main thread has of a core (CPU time) or waits for one (the
# kernel's run delay), and the time in which nothing of the process runs at all: it was stopped, or its group of
# processes has used up its share of the machine. The kernel does not count the last, so a thread notes how much
# later it wakes than it asked to. Waiting for a disk counts as waiting for others. All of it is read once for
# many steps.

PAUSE_SECONDS = 0.02
"""Seconds between two wakes of the thread: of a rank that runs 10 ms of each 100 ms it finds most of the 90 ms."""
SCHEDSTAT = "/proc/thread-self/schedstat"
"""File of the kernel with nanoseconds that a thread has run, and that it has waited for a core."""


class ThreadTime:
    """Measures the thread that makes it, from `begin` on."""

    def __init__(self) -> None:
        """Starts the thread that finds out when the process stands still."""
        self._noted = (0.0, time.perf_counter())
        """Seconds that the process stood still, and when the thread woke last; replaced as one."""
        self._ended = False
        try:
            self._schedstat: int | None = os.open(SCHEDSTAT, os.O_RDONLY)  # of this thread, whoever reads it
        except OSError:  # another system: who waits for a core is taken to wait for others
            self._schedstat = None
        threading.Thread(target=self._watch, name="own-time", daemon=True).start()
        self.begin()

    def begin(self) -> None:
        """Begins a stretch; what was before it does not count."""
        self._began = self._read()

    def taken(self) -> tuple[float, float]:
        """Returns the seconds since the stretch began that this rank took itself, and those by the clock."""
        began, now = self._began, self._read()
        wall, running, delayed, still = (after - before for before, after in zip(began, now, strict=True))
        # who is held back by a limit of its group may be counted in both
        return min(wall, running + max(delayed, still)), wall

    def close(self) -> None:
        """Ends the thread."""
        self._ended = True
        if self._schedstat is not None:
            with suppress(OSError):
                os.close(self._schedstat)
            self._schedstat = None

    def _read(self) -> tuple[float, float, float, float]:
        delayed = 0.0
        if self._schedstat is not None:
            delayed = 1e-9 * int(os.pread(self._schedstat, 100, 0).split()[1])
        standstill, woke = self._noted
        now = time.perf_counter()  # the process may go on before the thread has noted that it stood still
        return now, time.thread_time(), delayed, standstill + _late(woke, now)

    def _watch(self) -> None:
        while not self._ended:
            time.sleep(PAUSE_SECONDS)
            standstill, woke = self._noted
            now = time.perf_counter()
            self._noted = standstill + _late(woke, now), now


def _late(woke: float, now: float) -> float:
    """Returns how much later than it asked to a thread wakes that has woken before."""
    late = now - woke - PAUSE_SECONDS
    return late if late > PAUSE_SECONDS else 0.0  # less is the interpreter's lock, and the scheduler's
