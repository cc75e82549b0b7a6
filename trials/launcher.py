"""Starts a fresh process for each candidate in well under a second, and ends it for certain.

A fork server has torch and this project imported and has run no operation, so what it forks is fresh:
nothing of one candidate reaches the next, and a crash of one is an event, not the end of the study.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trials.events import EVENTS, RANK_LOG, Event, EventReader, Failed

if TYPE_CHECKING:
    from trials.worker import Task

LAST_LINES = 5
"""Of a dead process's log, kept with its error."""
LAST_WORDS = ("trained", "diverged", "scored", "failed")
"""Events that tell how a run ended."""
POLL_SECONDS = 0.1
"""Between two looks at the events of processes that run."""
PRELOADED = ("torch._dynamo", "pyarrow.dataset", "trials.worker")
"""What a process would otherwise import itself, each time: the first belongs to an optimizer's first use."""
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
"""OpenMP in the server must never have had more than one thread, or processes that use two hang; and what
lies in the current folder (a `trials/` of the user's) must not be imported in place of this project."""


class Run:
    """A task in a process of its own."""

    def __init__(self, process: ForkServerProcess, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._read = EventReader(directory / EVENTS)
        self._told = False
        self.ended = False
        """The process is gone and its last events have been handed out."""

    @property
    def sentinel(self) -> int:
        """Ready when the process ends (see `wait_for`)."""
        return self._process.sentinel

    def new_events(self) -> list[Event]:
        """Events since the last call.

        A process that died without a word (a signal, the kernel's out-of-memory killer) gives a `Failed`
        with the signal and the last lines of its log.
        """
        alive = self._process.is_alive()
        events = self._read()
        self._told = self._told or any(event.event in LAST_WORDS for event in events)
        if not alive and not self.ended:
            self.ended = True
            if not self._told:
                events.append(self._death())
        return events

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


def wait_for(runs: Iterable[Run], seconds: float = POLL_SECONDS) -> None:
    """Until one of the processes has ended, for `seconds` at most."""
    connection.wait([run.sentinel for run in runs], seconds)


class Launcher:
    """Owns the fork server."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))

    def warm_up(self) -> None:
        """Starts the fork server's imports (seconds) while the caller does something else."""
        with _server_environment():
            forkserver.ensure_running()

    def start(self, task: Task, directory: Path) -> Run:
        """A process that runs `task` in `directory`, which must exist; an earlier run's events are dropped."""
        from trials.worker import main

        (directory / EVENTS).unlink(missing_ok=True)
        process = self._context.Process(target=main, args=(task.to_dict(), str(directory)), daemon=True)
        with _server_environment(), _without_main():
            process.start()
        return Run(process, directory)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """What the fork server must be started with, should it be started now."""
    before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
    os.environ.update(SERVER_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Multiprocessing would import the caller's main module in each process; what runs there needs none of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
