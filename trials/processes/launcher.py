"""Starts fresh processes for each candidate, one per rank, in well under a second, and ends them for certain.

A fork server has torch and this project imported and has run no operation, so what it forks is fresh:
nothing of one candidate reaches the next, and a crash of one is an event, not the end of the study.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trials.processes.fork_server import server_environment
from trials.processes.rank_process import LocalRank
from trials.processes.replacements import Replacements
from trials.processes.supervisor import POLL_SECONDS, AnyRun, Run, forget_last_run, wait_for
from trials.without_main import without_main

if TYPE_CHECKING:
    from trials.processes.task import Task

LOG = logging.getLogger(__name__)
__all__ = ["POLL_SECONDS", "AnyLauncher", "AnyRun", "Launcher", "Run", "wait_for"]
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "pyarrow.dataset", "trials.processes.worker")
"""Modules that a process would otherwise import itself, each time: the first belongs to an optimizer's first
use."""
PRELOADED_FOR_SEVERAL = ("trials.embeddings.preload",)
"""Modules that are preloaded for ranks whose tables are sharded: a third of a second, once (2 cores,
2026-11-21)."""
SERVER_GONE_SECONDS = 0.1
"""Seconds until a server whose pipe broke is known to be dead."""

NOWHERE_ELSE = "and trains on, as there is no other machine to go on at"
"""What comes of a slow rank on the only machine."""

RankArguments = tuple[dict[str, object], str, int]
"""The arguments of a rank: the task as plain data, the trial's directory, the rank."""
RankMain = Callable[[dict[str, object], str, int], None]
"""The function that a process runs with these arguments."""


class AnyLauncher(Protocol):
    """What starts tasks, here alone or on several hosts."""

    def start(self, task: Task, directory: Path) -> AnyRun:
        """See `Launcher`."""


class Launcher:
    """Owns the fork server."""

    def __init__(self, *, several_ranks: bool = False) -> None:
        """With `several_ranks` candidates will have several, so TorchRec is imported once, for all."""
        modules = [*PRELOADED, *(PRELOADED_FOR_SEVERAL if several_ranks else ())]
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(modules)
        self._started: weakref.WeakSet[LocalRank] = weakref.WeakSet()
        atexit.register(_kill_all, self._started)  # multiprocessing would wait for one that hangs

    def warm_up(self) -> None:
        """Starts the fork server's imports (seconds) while the caller does something else."""
        LOG.info("fork server: is started, unless it runs")
        with server_environment():
            forkserver.ensure_running()

    def start(self, task: Task, directory: Path) -> Run:
        """Starts processes that run `task` in `directory`, which must exist; an earlier run's events are dropped.

        Raises:
            UserError: where this machine has fewer CUDA devices than the task has ranks here.
        """

        def anew(again: Task, process: int) -> LocalRank:
            (rank,) = self.ranks(again, directory, [process])
            return rank

        task = self._with_devices(task)
        return _run_of(self.ranks(task, directory), task, directory, Replacements(task, anew))

    def launch(self, main: RankMain, task: Task, directory: Path) -> Run:
        """Starts the task with another entry function for its processes."""
        return _run_of(self._fork(main, task, directory), task, directory)

    def ranks(self, task: Task, directory: Path, processes: Sequence[int] | None = None) -> list[LocalRank]:
        """Starts the task's ranks and servers on this machine, all or some of them, for whoever watches them.

        Raises:
            UserError: where this machine has fewer CUDA devices than the task has ranks here.
        """
        from trials.distributed.process_group import check_devices
        from trials.processes.worker import main

        check_devices(len(task.ranks_here))
        return self._fork(main, task, directory, processes)

    def _fork(
        self, main: RankMain, task: Task, directory: Path, processes: Sequence[int] | None = None
    ) -> list[LocalRank]:
        ranks = task.processes_here if processes is None else processes
        forget_last_run(directory, ranks)
        arguments = [(task.to_dict(), str(directory), rank) for rank in ranks]
        with server_environment(), without_main():
            try:
                forked = self._processes(main, arguments)
            except (EOFError, OSError):  # the server was killed just then, and its ranks with it
                LOG.warning("fork server: gone; another one starts the ranks of %s", directory)
                time.sleep(SERVER_GONE_SECONDS)
                forked = self._processes(main, arguments)
        started = [LocalRank(process, task.device(rank)) for process, rank in zip(forked, ranks, strict=True)]
        self._started.update(started)
        LOG.info(
            "%s: ranks and servers %s are processes %s",
            task.logs(directory).path(ranks[0]),
            ", ".join(map(str, ranks)),
            ", ".join(str(process.pid) for process in forked),
        )
        return started

    def _with_devices(self, task: Task) -> Task:
        """Gives the task's ranks those of this machine's CUDA devices that the fewest ranks have now."""
        from trials.distributed.process_group import visible_devices

        visible, count = visible_devices(), len(task.ranks_here)
        if task.devices is not None or len(visible) <= count:
            return task
        taken = Counter(rank.device for rank in self._started if rank.is_alive())
        return task.replace(devices=tuple(sorted(visible, key=lambda device: taken[device])[:count]))

    def _processes(self, main: RankMain, arguments: list[RankArguments]) -> list[ForkServerProcess]:
        """Starts all processes, or none; a server that is gone is replaced."""
        processes = list[ForkServerProcess]()
        try:
            for rank_arguments in arguments:
                processes.append(self._context.Process(target=main, args=rank_arguments, daemon=True))
                processes[-1].start()
        except BaseException:
            for process in processes:
                if process.pid is not None:
                    process.kill()
            raise
        return processes


def _run_of(
    ranks: list[LocalRank], task: Task, directory: Path, replacements: Replacements | None = None
) -> Run:
    return Run(
        dict(zip(task.processes_here, ranks, strict=True)),
        task.logs(directory),
        deadline_seconds=task.deadline_seconds,
        replacements=replacements,
        slow=lambda slow: slow.replace(
            where=device_words(socket.gethostname(), task.device(slow.rank)), then=NOWHERE_ELSE
        ),
    )


def device_words(host: str, device: str | None) -> str:
    """Returns where a rank is, for sentences: its host, and its CUDA device where it was given one."""
    return host if device is None else f"{host}, device {device}"


def _kill_all(ranks: weakref.WeakSet[LocalRank]) -> None:
    for rank in list(ranks):
        rank.kill()
