"""Measures in several processes at the same time, of which none is left when a measurement is broken off.

A measurement may have a time by which it has to end, since how long it takes depends on what else runs here.

Ctrl-C reaches every process of a terminal's command. The ones that measure never see it, so that none writes a
traceback; the command ends them.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from dhen.errors import UserError
from trials.cluster.machine import Precision
from trials.end_with_parent import end_with_parent
from trials.profiling.on_ranks import SharedMeasured, SharedSetting, time_rank
from trials.profiling.timing import Measured, time_everything
from trials.without_main import without_main

T = TypeVar("T")
Say = Callable[[str], None]
"""A function that takes a line for the user."""
SAY_SECONDS = 20.0
"""Seconds between two lines."""


class MeasuringTookTooLongError(Exception):
    """The time by which a measurement had to end has come, and it is not done."""


def measured_at_once(
    precision: Precision, say: Say, *, threads: int, processes: int, until: float = math.inf
) -> list[Measured]:
    """Returns what each of so many processes has timed while the others did too; says now and then that it goes
    on.

    Raises:
        UserError: when one of them ended before it had measured.
        MeasuringTookTooLongError: when it is not done at `until`, in seconds of `time.monotonic`.
    """
    return _at_once(time_everything, [(precision, threads, until)] * processes, say, until)


def measured_on_ranks(setting: SharedSetting, say: Say, *, until: float = math.inf) -> list[SharedMeasured]:
    """Returns what each rank has timed; says now and then that it goes on.

    Raises:
        UserError: when one of them ended before it had measured.
        MeasuringTookTooLongError: when it is not done at `until`, in seconds of `time.monotonic`.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _at_once(time_rank, [(setting, rank, folder) for rank in range(setting.world)], say, until)


def _at_once(
    measure: Callable[..., T], of_each: Sequence[tuple[Any, ...]], say: Say, until: float = math.inf
) -> list[T]:
    began = time.monotonic()

    def received(end: Connection) -> T:
        while not end.poll(min(SAY_SECONDS, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise MeasuringTookTooLongError
            say(f"... measuring, after {time.monotonic() - began:.0f} s; other programs make it longer")
        found: T = end.recv()
        return found

    with ExitStack() as stack:
        ends = [stack.enter_context(_measuring(measure, arguments)) for arguments in of_each]
        try:
            return [received(end) for end in ends]
        except EOFError:
            raise UserError(
                f"one of {len(ends)} processes that measure this CPU ended early. Where it left no message, it "
                "was killed, most often for lack of memory: free some, or train fewer trials side by side."
            ) from None


@contextmanager
def _measuring(measure: Callable[..., T], arguments: tuple[Any, ...]) -> Iterator[Connection]:
    """Gives the end of a pipe to which a process sends what it has timed; the process is killed with the block."""
    context = get_context("spawn")
    end, other_end = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(other_end, os.getpid(), measure, arguments), daemon=True)
    resource_tracker.ensure_running()  # which leaves SIGINT unblocked where a process's start has to begin it
    try:
        with other_end:
            # a process inherits what is blocked; SIGINT that comes meanwhile is raised here afterwards
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                with without_main():
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield end
    finally:
        end.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _measure(
    end: Connection, parent: int, measure: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    """Runs in a process of its own."""
    end_with_parent(parent)
    end.send(measure(*arguments))
    # gloo's threads can end a process with a message while the interpreter is taken down
    os._exit(0)
