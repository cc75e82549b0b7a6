"""What runs on each host of a Ray cluster for one study: an actor that starts ranks as the driver says.

It owns the host's warm fork server, so a candidate's ranks start in well under a second. It knows no studies and
decides nothing: it starts its ranks of a task, tells how each ended, and ends them when told to; they end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from dhen.errors import UserError
from dhen.values import parse
from trials.data.prepared_log import PreparedLog
from trials.records.events import FailureEvent, LastWords, RankLogs
from trials.records.places import family_of
from trials.records.task import Task
from trials.runtime.hosts.ray_connection import devices_here, token_is_asked_for, versions_here
from trials.runtime.launcher import Launcher
from trials.runtime.rank_process import LocalRank, endings_of, memory_kills

LISTEN_SECONDS = 2.0
"""Longest time until a host that has nothing to tell says so: a driver that hears nothing takes it to be gone."""


class StudyNeeds(NamedTuple):
    """What all hosts must find where the driver has it."""

    log_directory: str
    log: str
    """Fingerprint of the prepared log."""
    get_log: Callable[[], PreparedLog] | None
    """How a host gets the log for itself, once for all its ranks; None if it must be in `log_directory`."""
    mark: str
    """A file in the run's directory."""
    mark_text: str
    """Content of that file."""


class HostFacts(NamedTuple):
    """What a host says of itself."""

    name: str
    versions: dict[str, str]
    devices: int | None
    """Number of CUDA devices; None for a machine that trains on its CPU."""
    asks_for_token: bool
    objection: str | None
    """Why the study cannot train there; None if it can."""


class RankEnded(NamedTuple):
    """One of the host's ranks is gone."""

    run: int
    rank: int
    exitcode: int
    killed: str | None
    """The state that the rank was in when it was killed on the driver's word; None if it ended by itself."""


class HostRanks(NamedTuple):
    """The ranks of one run on this host."""

    ranks: dict[int, LocalRank]
    logs: RankLogs
    memory_kills: int | None
    """Processes that the kernel had killed for want of memory when the ranks began."""


class Agent:
    """The actor; its methods are called from several threads."""

    def __init__(self, make_launcher: Callable[[], Launcher]) -> None:
        """Starts the fork server's imports."""
        self._launcher = make_launcher()
        self._launcher.warm_up()
        self._log_directory: str | None = None
        """Where the log is here; None as long as it is where the driver has it."""
        self._runs: dict[int, HostRanks] = {}
        self._never_started: list[RankEnded] = []
        self._given_up: set[int] = set()
        """Runs that were to end, some of them before they had started: calls may overtake each other."""
        self._lock = threading.RLock()
        """Held while ranks are looked at: of two threads that ask a process for its exit code one gets none."""
        self._begun, self._begins = connection.Pipe(duplex=False)

    def facts(self, study: StudyNeeds) -> HostFacts:
        """Returns what the driver must know before it starts ranks here."""
        return HostFacts(
            name=socket.gethostname(),
            versions=versions_here(),
            devices=devices_here(),
            asks_for_token=token_is_asked_for(),
            objection=_objection(study),
        )

    def get_log(self, study: StudyNeeds) -> str | None:
        """Gets the study's log for this host, if it is not in its cache yet; ranks then read this one.

        Returns:
            Why it cannot be had; None if it is there.
        """
        assert study.get_log is not None
        try:
            log = study.get_log()
        except (UserError, OSError) as error:
            return str(error)
        if log.fingerprint != study.log:
            return (
                f"{log.directory} is not the log that the study began with: what it was made of has changed"
            )
        self._log_directory = str(log.directory.absolute())
        return None

    def free_port(self, host: str) -> int:
        """Returns a free port of this host: each candidate has its own, as the last one's may be closing still."""
        with socket.socket(family_of(host)) as free:
            free.bind((host, 0))
            return int(free.getsockname()[1])

    def start(self, run: int, task_data: dict[str, object], folder: str, ranks: list[int]) -> None:
        """Starts a task's `ranks`, at first or anew; a task that cannot be started here ends like one whose ranks
        fail."""
        directory = Path(folder)
        try:
            # without the lock: the first ranks wait for all that the fork server imports
            task = parse(Task, task_data, "the driver's task")
            if self._log_directory is not None:
                task = task.replace(log_directory=self._log_directory)
            its = dict(zip(ranks, self._launcher.ranks(task, directory, ranks), strict=True))
        except Exception as error:  # whatever it is, somebody waits for these ranks
            words = LastWords(failed=FailureEvent(error=f"cannot start: {error}"), unix_seconds=time.time())
            for rank in ranks:
                with contextlib.suppress(OSError):  # then the exit code alone says that it failed
                    words.leave(directory, rank)
                self._never_started.append(RankEnded(run, rank, 1, None))
        else:
            with self._lock:
                begun = self._runs.setdefault(run, HostRanks({}, task.logs(directory), memory_kills()))
                begun.ranks.update(its)
                if run in self._given_up:
                    self.kill(run)
        self._begins.send_bytes(b"!")

    def show_stacks(self, run: int) -> None:
        """Asks the ranks of a run to write their stacks into their logs."""
        with self._lock:
            for rank in self._ranks_of(run):
                rank.show_stack()

    def kill(self, run: int) -> None:
        """Ends the ranks of a run at once."""
        with self._lock:
            self._given_up.add(run)
            for rank in self._ranks_of(run):
                rank.kill()
            for rank in self._ranks_of(run):
                rank.join()

    def ended(self) -> list[RankEnded]:
        """Waits until a rank has ended, for `LISTEN_SECONDS` at most; returns those that have."""
        deadline = time.monotonic() + LISTEN_SECONDS
        while True:
            with self._lock:
                endings = self._who_ended()
                while self._never_started:
                    endings.append(self._never_started.pop())
                sentinels = [rank.sentinel for run in self._runs.values() for rank in run.ranks.values()]
            remaining = deadline - time.monotonic()
            if endings or remaining <= 0:
                return endings
            if self._begun in connection.wait([self._begun, *sentinels], remaining):
                self._begun.recv_bytes()

    def _ranks_of(self, run: int) -> list[LocalRank]:
        return list(self._runs[run].ranks.values()) if run in self._runs else []

    def _who_ended(self) -> list[RankEnded]:
        endings = []
        for number, run in list(self._runs.items()):
            for rank, process in list(run.ranks.items()):
                if not process.is_alive():
                    del run.ranks[rank]
                    assert process.exitcode is not None
                    _note_memory_kill(run, rank, process)
                    endings.append(RankEnded(number, rank, process.exitcode, process.killed))
            if not run.ranks:
                del self._runs[number]
        return endings


def _note_memory_kill(run: HostRanks, rank: int, process: LocalRank) -> None:
    """Leaves the last words of a rank that was killed while memory was short here: only this host can know."""
    (ending,) = endings_of({rank: process.exitcode}, {}, run.logs.folder)
    unasked = process.exitcode == -signal.SIGKILL and process.killed is None
    if ending.words is None and unasked and memory_kills() != run.memory_kills:
        error = (
            "killed by signal 9 (SIGKILL), while the kernel of its host ended processes for want of memory"
        )
        words = LastWords(failed=FailureEvent(error=error, out_of_memory=True), unix_seconds=0.0)
        words.leave(run.logs.folder, rank)


def _objection(study: StudyNeeds) -> str | None:
    """Returns why this host cannot train for the study; None if it can."""
    path = Path(study.log_directory)
    try:
        if study.get_log is None and PreparedLog.open(path).fingerprint != study.log:
            return f"{path} holds another log there than where the study runs. {SHARED}"
    except UserError as error:
        return f"{error} {SHARED}"
    try:
        if Path(study.mark).read_text() == study.mark_text and os.access(Path(study.mark).parent, os.W_OK):
            return None
    except OSError:
        pass
    return f"{Path(study.mark).parent} is not the study's directory there. {SHARED}"


SHARED = (
    "All nodes need the prepared log and the run's directory at the same paths, on a file system that they share "
    "with the machine that runs the study; of a log at a URL each node makes a copy of its own."
)
