"""Measures in several processes at the same time, of which none is left when a measurement is broken off.

Ctrl-C reaches every process of a terminal's command. The ones that measure never see it, so that none writes a
traceback; the command ends them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection

from dhen.errors import UserError
from trials.cluster.machine import Precision
from trials.profiling.timing import Measured, time_everything


def measured_at_once(precision: Precision, *, threads: int, processes: int) -> list[Measured]:
    """Returns what each of so many processes has timed while the others did too.

    Raises:
        UserError: when one of them ended before it had measured.
    """
    with ExitStack() as stack:
        ends = [stack.enter_context(_measuring(precision, threads)) for _ in range(processes)]
        try:
            return [end.recv() for end in ends]
        except EOFError:
            raise UserError(
                f"one of {processes} processes that measure this CPU ended early. Where it left no message, it "
                "was killed, most often for lack of memory: free some, or train fewer trials side by side."
            ) from None


@contextmanager
def _measuring(precision: Precision, threads: int) -> Iterator[Connection]:
    """Gives the end of a pipe to which a process sends what it has timed; the process is killed with the block."""
    context = get_context("spawn")
    end, other_end = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(other_end, precision, threads), daemon=True)
    resource_tracker.ensure_running()  # which leaves SIGINT unblocked where a process's start has to begin it
    try:
        with other_end:
            # a process inherits what is blocked; SIGINT that comes meanwhile is raised here afterwards
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield end
    finally:
        end.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _measure(end: Connection, precision: Precision, threads: int) -> None:
    """Runs in a process of its own."""
    end.send(time_everything(precision, threads))
