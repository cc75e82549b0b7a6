"""How long a rank takes itself, which is all the time but that in which it waits for others.

By the clock all ranks take equally long, as each step has collectives in which the faster ones wait. Who waits
there sleeps; so a rank's own time is what its main thread has of a core (CPU time) or waits for one (the kernel's
run delay), and the time in which nothing of the process runs at all: it was stopped, or its group of processes
has used up its share of the machine. The kernel does not count the last, so a thread notes how much later it
wakes than it asked to. Waiting for a disk counts as waiting for others. All of it is read once for many steps.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

PAUSE_SECONDS = 0.02
"""Seconds between two wakes of the thread: of a rank that runs 10 ms of each 100 ms it finds most of the 90 ms."""
SCHEDSTAT = "/proc/thread-self/schedstat"
"""File of the kernel with nanoseconds that a thread has run, and that it has waited for a core."""


class OwnSeconds(NamedTuple):
    """What a rank took of a stretch of steps."""

    own: float
    """Seconds that it took itself."""
    wall: float
    """Seconds by the clock."""


class OwnTime:
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

    def taken(self) -> OwnSeconds:
        """Returns what was taken since the stretch began."""
        began, now = self._began, self._read()
        wall, running, delayed, still = (after - before for before, after in zip(began, now, strict=True))
        # who is held back by a limit of its group may be counted in both
        return OwnSeconds(min(wall, running + max(delayed, still)), wall)

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
