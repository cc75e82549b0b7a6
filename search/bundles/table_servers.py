"""Servers of embedding tables for online training: the command's own process trains, processes beside it hold the
tables, and end with it however it ends."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from dhen.errors import UserError
from trials.records.job import Job
from trials.records.strategy import Strategy
from trials.records.task import Task
from trials.runtime.launcher import Launcher, forget_last_run
from trials.runtime.rank_process import LocalRank, endings_of, how
from trials.store.weights import save_weights
from trials.training.process_group import meeting_of_servers
from trials.training.servers.client import Servers
from trials.training.servers.messages import LinkBrokenError

LOG = logging.getLogger(__name__)
SERVERS = "servers"
"""Folder, beside the checkpoints of online training, in which servers have their logs."""
START = "start.safetensors"
"""File that servers start from, removed once they have."""
END_SECONDS = 5.0
"""Seconds that servers have to end by themselves, and that one whose connection broke has to be gone."""
LOOK_SECONDS = 0.02
"""Seconds between two looks at whether processes have ended."""


class TableServers:
    """The processes of the servers, and the connection to them."""

    def __init__(self, job: Job, count: int, log_directory: Path, folder: Path) -> None:
        """Starts none yet.

        Args:
            job: the job, resolved.
            count: number of servers.
            log_directory: directory of a prepared log, which tasks have; servers read no rows.
            folder: where servers write their logs, and meet the trainer.
        """
        self.strategy = Strategy(servers=count)
        """How the trainer holds the model."""
        self._task = Task(job=job, log_directory=str(log_directory), threads=1, strategy=self.strategy)
        self._launcher, self._folder = Launcher(), folder
        self._launcher.warm_up()
        self._processes = dict[int, LocalRank]()
        self._servers: Servers | None = None

    def start(self, weights: Mapping[str, Tensor], learnt: Mapping[str, Tensor]) -> Servers:
        """Starts servers, in place of any before, with weights of the whole model and optimizer state; returns the
        connection to them.

        Raises:
            LinkBrokenError: if one of them ends meanwhile.
        """
        self.end()
        self._folder.mkdir(parents=True, exist_ok=True)
        start = self._folder / START
        save_weights({**weights, **learnt}, start)
        task = self._task.replace(start_from=str(start), start_learnt=True)
        numbers = [number for number in task.processes_here if task.server(number) is not None]
        forget_last_run(self._folder, task.processes_here)
        try:
            started = self._launcher.ranks(task, self._folder, numbers)
            self._processes = dict(zip(numbers, started, strict=True))
            store = meeting_of_servers(self._folder, None, makes=False)
            self._servers = Servers(store, 0, 1, self.strategy.servers, watch=self._check)
        finally:
            start.unlink()
        return self._servers

    @contextlib.contextmanager
    def watched(self, stays: Callable[[], str]) -> Iterator[None]:
        """A context at whose end no server is left.

        Args:
            stays: returns a sentence on what there is, if a server was lost.

        Raises:
            UserError: if a server was lost, naming it.
        """
        try:
            yield
            if self._servers is not None:
                # servers end by themselves, which writes how it went into their logs
                self._servers.leave()
                self._wait(all_gone=True)
        except LinkBrokenError as error:
            raise self._lost(error, stays()) from error
        finally:
            self.end()

    def end(self) -> None:
        """Ends all servers at once."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def _check(self) -> None:
        """Raises `LinkBrokenError` if a server is gone."""
        if gone := [number for number, process in self._processes.items() if not process.is_alive()]:
            raise LinkBrokenError(f"{self._task.logs(self._folder).words(gone[0])} is gone")

    def _wait(self, *, all_gone: bool) -> None:
        """Waits until all servers are gone, or one is."""
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until:
            alive = sum(process.is_alive() for process in self._processes.values())
            if not alive or (alive < len(self._processes) and not all_gone):
                return
            time.sleep(LOOK_SECONDS)

    def _lost(self, error: LinkBrokenError, stays: str) -> UserError | LinkBrokenError:
        """Returns the error that names a lost server; the error itself if all live."""
        self._wait(all_gone=False)
        logs = self._task.logs(self._folder)
        codes = {number: process.exitcode for number, process in self._processes.items()}
        gone = {number: code for number, code in codes.items() if code is not None}
        if not gone:
            return error
        cause = min(endings_of(gone, {}, self._folder), key=lambda ending: ending.order)
        if cause.words is not None:
            return UserError(
                f"{logs.words(cause.rank)} of the tables failed: {cause.words.failed.error} {stays}"
            )
        log = logs.path(cause.rank)
        return UserError(f"{logs.words(cause.rank)} of the tables {how(cause)}. {stays} Its log is {log}.")
