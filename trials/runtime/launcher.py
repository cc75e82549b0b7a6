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
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trials.records.events import (
    EVENTS,
    RENDEZVOUS,
    SERVERS_RENDEZVOUS,
    Event,
    EventReader,
    FailureEvent,
    Progress,
    RankLogs,
    ReplacementEvent,
    SlowRank,
    last_words,
)
from trials.records.places import checkpoints_in
from trials.runtime.fork_server import server_environment, without_main
from trials.runtime.rank_process import (
    LocalRank,
    RankExit,
    RankProcess,
    endings_of,
    how,
    memory_kills,
    verdict,
)

if TYPE_CHECKING:
    from trials.records.task import Task


# Which processes of a training are started anew when they are killed, while the others go on.
#
# A rank that trains on its own against servers has nothing that others wait for, and a server comes back with
# what it last saved if no step needs all updates. All else ends the attempt, which goes on from its newest
# checkpoint.


class Replacements:
    """The processes of one attempt that were started anew."""

    def __init__(self, task: Task, start: Callable[[Task, int], RankProcess]) -> None:
        """`start` starts one process of a task, by its number."""
        self._task, self._start = task, start
        self._restarts = Counter[int]()
        self._examples = dict[int, int]()
        """Examples that were done when a process was started anew for the last time."""

    def possible(self, process: int, examples: int) -> bool:
        """Tells whether a process that is killed after so many examples can be started anew.

        One that is killed again before there was any progress ends the attempt: what kills it may be in it.
        """
        task = self._task
        if not task.trains or examples <= self._examples.get(process, 0):
            return False
        if task.server(process) is None:
            return task.ranks_on_their_own and process > 0  # the first evaluates, and tells of it
        saved = task.resume_from is not None and bool(checkpoints_in(Path(task.resume_from)))
        return saved and task.job.training.tables.servers_return

    def start(self, process: int, examples: int) -> RankProcess:
        """Starts a process anew."""
        self._restarts[process] += 1
        self._examples[process] = examples
        return self._start(self._task.replace(restarts=self._restarts[process]), process)


# Watches the processes of a candidate: one that dies, hangs or loses its peers ends all of them, with the
# reason.
#
# A rank that fails says so in a file and ends at once, so its peers see the broken connection and end too;
# what still lives a moment later is killed. Ranks that hang are found by the silence of rank 0, whose events
# are the only sign of progress. What the others can go on without is started anew.

FINAL = ("trained", "diverged", "scored", "timed", "failed")
"""Events that tell how a run ended."""
POLL_SECONDS = 0.1
"""Seconds between two looks at the events of processes that run."""
GRACE_SECONDS = 2.0
"""Seconds that the other ranks have to end by themselves once one has ended badly, or all is told."""
STOPPED_SECONDS = 5.0
"""Seconds after which a process that was stopped by a signal, and that can be replaced, is killed."""
STACK_SECONDS = 0.3
"""Seconds that hanging ranks have to write their stacks into their logs."""
LONGEST_LOOK_SECONDS = 5.0
"""Longest silence that one look counts: a driver that looks less often (it was stopped, it proposes) is no
evidence of longer silence."""


class AnyRun(Protocol):
    """A task in processes of its own, wherever they are."""

    @property
    def ended(self) -> bool:
        """Whether all processes are gone and their last events have been handed out."""

    @property
    def sentinels(self) -> list[int]:
        """See `Run`."""

    def new_events(self) -> list[Event]:
        """See `Run`."""

    def kill(self) -> None:
        """Ends the processes at once."""


class Run:
    """A task in processes of its own, one per rank."""

    def __init__(
        self,
        processes: Mapping[int, RankProcess],
        logs: RankLogs,
        *,
        deadline_seconds: float | None = None,
        replacements: Replacements | None = None,
        slow: Callable[[SlowRank], SlowRank] = lambda slow: slow,
    ) -> None:
        """Takes over processes that were started.

        Args:
            processes: the processes, by their numbers.
            logs: their logs, in the trial's directory.
            deadline_seconds: seconds of silence that are a hang.
            replacements: starts processes anew; None if any that is killed ends all.
            slow: is told of a slow rank each time that ranks say so; returns the same with where it is, and what
                comes of it.
        """
        self._slow = slow
        self._slow_ranks = set[int]()
        """Ranks that were told to be slow."""
        self._moves: SlowRank | None = None
        """The slow rank because of which the processes are ended to go on elsewhere."""
        self._replacements = replacements
        self._stopped_since = dict[int, float]()
        self._processes = dict(processes)
        self._logs, self._directory = logs, logs.folder
        self._deadline_seconds = deadline_seconds
        self._read = EventReader(logs.folder / EVENTS)
        self._progress: Progress | None = None
        self._told = False
        self._silent_seconds, self._looked = 0.0, time.monotonic()
        self._ending_since: float | None = None
        self._gone: set[int] = set()
        self._hung_seconds: float | None = None
        self._memory_kills = memory_kills()
        self.ended = False
        """Whether all processes are gone and their last events have been handed out."""

    @property
    def sentinels(self) -> list[int]:
        """Sentinels, each ready once a process has ended of which `new_events` does not know yet (see
        `wait_for`)."""
        return [process.sentinel for rank, process in self._processes.items() if rank not in self._gone]

    def new_events(self) -> list[Event]:
        """Returns the events since the last call.

        Ranks that ended without a result (an exception, a signal, the kernel's out-of-memory killer, a hang)
        give one `FailureEvent` with the reason and the last lines of the log.
        """
        alive = self._alive()  # before reading: who is gone has said all
        events = self._hear()
        if replaced := self._replaced():
            events, alive = [*events, *replaced], self._alive()
        events = self._with_places(events)
        self._gone = self._processes.keys() - set(alive)
        if alive and self._is_over(alive):
            self._kill(alive)
            events += self._with_places(self._hear())
            alive = []
        if not alive and not self.ended:
            self.ended = True
            for name in (RENDEZVOUS, SERVERS_RENDEZVOUS):
                (self._directory / name).unlink(missing_ok=True)
            # without rank 0 on this machine only the exit codes say that all went well
            failed = 0 in self._processes or any(process.exitcode for process in self._processes.values())
            if failed and not self._told:
                events.append(self._verdict())
        return events

    def kill(self) -> None:
        """Ends the processes at once."""
        self._replacements = None
        self._kill(self._alive())

    def _replaced(self) -> list[Event]:
        """Starts those that were killed anew, unless one of them cannot be; returns what became of each."""
        if self._replacements is None or self._told or self._progress is None:
            return []
        examples = self._progress.examples
        self._end_stopped(examples)
        bad = {number: process for number, process in self._processes.items() if process.exitcode}
        if not bad or memory_kills() != self._memory_kills:
            return []
        if any(
            (process.exitcode or 0) > 0 or not self._replacements.possible(number, examples)
            for number, process in bad.items()
        ):
            return []
        events = list[Event]()
        for ending in self._endings(bad):
            self._processes[ending.rank] = self._replacements.start(ending.rank, examples)
            events.append(
                ReplacementEvent(process=self._logs.words(ending.rank), how=how(ending), examples=examples)
            )
        return events

    def _end_stopped(self, examples: int) -> None:
        """Kills those that were stopped by a signal for a while, and can be replaced."""
        assert self._replacements is not None
        for number, process in self._processes.items():
            if not (self._replacements.possible(number, examples) and process.is_stopped()):
                self._stopped_since.pop(number, None)
            elif (
                time.monotonic() - self._stopped_since.setdefault(number, time.monotonic()) > STOPPED_SECONDS
            ):
                self._kill([number])

    def _with_places(self, events: list[Event]) -> list[Event]:
        """Completes what the ranks say of slow ones, each of which is told once, unless something comes of it."""
        completed = list[Event]()
        for event in events:
            if isinstance(event, SlowRank):
                event = self._slow(event)
                if event.rank in self._slow_ranks and not event.moves:
                    continue
                self._slow_ranks.add(event.rank)
                self._moves = event if event.moves else self._moves
            completed.append(event)
        return completed

    def _alive(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if process.is_alive()]

    def _hear(self) -> list[Event]:
        events = self._read()
        for event in events:
            self._told = self._told or event.event in FINAL
            self._progress = event if isinstance(event, Progress) else self._progress
        now = time.monotonic()
        self._silent_seconds += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        if events:
            self._silent_seconds = 0.0
        return events

    def _is_over(self, alive: list[int]) -> bool:
        """Tells whether the processes that still live are to be ended."""
        deadline = self._deadline_seconds
        if self._moves is not None and not self._told:
            return True
        if not self._told and deadline is not None and self._silent_seconds > deadline:
            self._hung_seconds = self._silent_seconds
            for rank in alive:
                self._processes[rank].show_stack()
            time.sleep(STACK_SECONDS)
            return True
        if self._told or any(process.exitcode for process in self._processes.values()):
            self._ending_since = self._ending_since or time.monotonic()
            return time.monotonic() - self._ending_since > GRACE_SECONDS
        return False

    def _kill(self, ranks: Iterable[int]) -> None:
        alive = [self._processes[rank] for rank in ranks if self._processes[rank].is_alive()]
        for process in alive:
            process.kill()
        for process in alive:
            process.join()

    def _verdict(self) -> FailureEvent:
        if self._moves is not None:
            return FailureEvent(error=self._moves.words, slow=True)
        endings, short = self._endings(self._processes), memory_kills() != self._memory_kills
        return verdict(endings, self._progress, self._logs, self._hung_seconds, memory_was_short=short)

    def _endings(self, processes: Mapping[int, RankProcess]) -> list[RankExit]:
        codes = {number: process.exitcode for number, process in processes.items()}
        killed = {
            number: process.killed for number, process in processes.items() if process.killed is not None
        }
        return endings_of(codes, killed, self._directory)


def forget_last_run(directory: Path, ranks: Iterable[int]) -> None:
    """Drops what these ranks have left of an earlier run, and, if rank 0 is among them, the events; logs stay,
    and go on."""
    for rank in ranks:
        for name in (last_words(rank), *(() if rank else (EVENTS, RENDEZVOUS, SERVERS_RENDEZVOUS))):
            (directory / name).unlink(missing_ok=True)


def wait_for(runs: Iterable[AnyRun], seconds: float = POLL_SECONDS) -> None:
    """Waits until one of the processes has ended, for `seconds` at most."""
    connection.wait({sentinel for run in runs for sentinel in run.sentinels}, seconds)


LOG = logging.getLogger(__name__)
__all__ = ["POLL_SECONDS", "AnyLauncher", "AnyRun", "Launcher", "Run", "wait_for"]
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "pyarrow.dataset", "trials.runtime.worker")
"""Modules that a process would otherwise import itself, each time: the first belongs to an optimizer's first
use."""
PRELOADED_FOR_SEVERAL = ("trials.training.embeddings.preload",)
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
            UserError: if this machine has fewer CUDA devices than the task has ranks here.
        """
        from trials.training.process_group import visible_devices

        def anew(again: Task, process: int) -> LocalRank:
            (rank,) = self.ranks(again, directory, [process])
            return rank

        visible, count = visible_devices(), len(task.ranks_here)
        if task.devices is None and len(visible) > count:  # those that the fewest ranks have now
            taken = Counter(rank.device for rank in self._started if rank.is_alive())
            task = task.replace(devices=tuple(sorted(visible, key=lambda device: taken[device])[:count]))
        return _run_of(self.ranks(task, directory), task, directory, Replacements(task, anew))

    def launch(self, main: RankMain, task: Task, directory: Path) -> Run:
        """Starts the task with another entry function for its processes."""
        return _run_of(self._fork(main, task, directory), task, directory)

    def ranks(self, task: Task, directory: Path, processes: Sequence[int] | None = None) -> list[LocalRank]:
        """Starts the task's ranks and servers on this machine, all or some of them, for whoever watches them.

        Raises:
            UserError: if this machine has fewer CUDA devices than the task has ranks here.
        """
        from trials.runtime.worker import main
        from trials.training.process_group import check_devices

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
    """Returns where a rank is, for sentences: its host, and its CUDA device if it was given one."""
    return host if device is None else f"{host}, device {device}"


def _kill_all(ranks: weakref.WeakSet[LocalRank]) -> None:
    for rank in list(ranks):
        rank.kill()
