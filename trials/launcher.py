"""Starts a fresh process for each candidate in well under a second, and ends it for certain.

A fork server has torch and this project imported and has run no operation, so what it forks is fresh:
nothing of one candidate reaches the next, and a crash of one is an event, not the end of the study.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

from trials.events import EVENTS, RANK_LOG, Event, EventReader, Failed

if TYPE_CHECKING:
    from trials.worker import Task

LAST_LINES = 5
"""Of a dead process's log, kept with its error."""


class Run:
    """A task in a process of its own."""

    def __init__(self, process: ForkServerProcess, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._read = EventReader(directory / EVENTS)

    def events(self) -> Iterator[Event | None]:
        """Events as they come, None about ten times a second between them; ends with the process.

        A process that died without a word (a signal, the kernel's out-of-memory killer) yields a
        `Failed` with the signal and the last lines of its log.
        """
        told = False
        while True:
            alive = self._process.is_alive()
            for event in self._read():
                told = told or event.event in ("trained", "diverged", "scored", "failed")
                yield event
            if not alive:
                break
            yield None
            self._process.join(0.1)
        if not told:
            yield self._death()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.join()

    def _death(self) -> Failed:
        code = self._process.exitcode
        log = self._directory / RANK_LOG
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Failed(
            error=f"the training process ended without a result ({how}). " + " | ".join(lines),
            out_of_memory=code == -9,  # what the kernel's out-of-memory killer sends
        )


class Launcher:
    """Owns the fork server."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        # an optimizer's first use imports torch._dynamo (a second and more), so the server has it beforehand
        self._context.set_forkserver_preload(["torch._dynamo", "trials.worker"])

    def warm_up(self) -> None:
        """Starts the fork server's imports (seconds) while the caller does something else."""
        with _one_openmp_thread():
            forkserver.ensure_running()

    def start(self, task: Task, directory: Path) -> Run:
        """A process that runs `task` in `directory`, which must exist; an earlier run's events are dropped."""
        from trials.worker import main

        (directory / EVENTS).unlink(missing_ok=True)
        process = self._context.Process(target=main, args=(task.to_dict(), str(directory)), daemon=True)
        with _one_openmp_thread():
            process.start()
        return Run(process, directory)


@contextlib.contextmanager
def _one_openmp_thread() -> Iterator[None]:
    """OpenMP in the server must never have had more than one thread, or children that use two hang."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
