"""A task on several hosts as one run: the ranks of other hosts are watched like those of this one.

A host that leaves ends the run on all of them; a run that finds a host missing waits for it before it starts.
"""

from __future__ import annotations

import logging
import socket
import time
from multiprocessing import connection
from pathlib import Path

from trials.address import family_of, host_and_port, with_port
from trials.events import START_MARK, Event, Failed, LastWords, RankLogs, last_words
from trials.hosts.hosts import Hosts, Member
from trials.hosts.wire import Kill, RankEnded, ShowStacks, Start
from trials.processes.launcher import Launcher
from trials.processes.rank_process import LocalRank
from trials.processes.supervisor import Run, forget_last_run
from trials.processes.task import Task

LOG = logging.getLogger(__name__)
FAREWELL_SECONDS = 10.0
"""Seconds that a host has to end its ranks, after which the host is taken to be gone itself."""
LOST = 1
"""Exit code of a rank of which no more is known than that its host is gone."""


class HostsLauncher:
    """Starts tasks on all hosts of a study."""

    def __init__(self, launcher: Launcher, hosts: Hosts) -> None:
        """`launcher` starts the ranks of this host."""
        self._launcher, self._hosts = launcher, hosts

    def start(self, task: Task, directory: Path) -> HostsRun:
        """Starts the task's ranks, here and elsewhere, as soon as all hosts that it needs are there.

        Raises:
            UserError: where this machine has fewer CUDA devices than the task has ranks here.
        """
        return HostsRun(
            self._launcher, self._hosts, next(self._hosts.run_numbers), task, directory.absolute()
        )


class RemoteRank:
    """A rank on another host, as a `RankProcess`."""

    def __init__(self, member: Member, hosts: Hosts, run: int, rank: int, logs: RankLogs) -> None:
        """Makes a rank that was asked for and not yet heard of; what it leaves goes to the trial's directory,
        where `logs` are."""
        self._member, self._hosts, self._run, self._rank, self._logs = member, hosts, run, rank, logs
        self.exitcode: int | None = None
        self.killed: str | None = None
        if member.why_gone is None:
            member.ranks[run, rank] = self
        else:
            self.lost(f"{member.words} {member.why_gone}")

    @property
    def sentinel(self) -> int:
        """See `RankProcess`."""
        return self._member.wire.sentinel

    def is_alive(self) -> bool:
        """See `RankProcess`."""
        self._hosts.hear()
        return self.exitcode is None

    def show_stack(self) -> None:
        """See `RankProcess`."""
        self._member.send(ShowStacks(run=self._run))

    def kill(self) -> None:
        """See `RankProcess`."""
        self._member.send(Kill(run=self._run))

    def join(self) -> None:
        """See `RankProcess`; a host that does not answer is given up."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self.is_alive():
            if time.monotonic() > deadline:
                self._member.lose("did not end its ranks when told to")
            connection.wait([self.sentinel], 0.1)

    def ended(self, message: RankEnded) -> None:
        """Notes the end as the rank's host tells it; its last words and lines are kept here, unless its host wrote
        them here itself."""
        self.exitcode, self.killed = message.exitcode, message.killed
        assert self._member.ready is not None
        if self._member.ready.shares_directory:
            return
        if message.words is not None:
            self._keep(message.words)
        with self._logs.path(self._rank).open("a", encoding="utf-8") as log:
            log.write(f"{START_MARK}the last lines on {self._member.words}\n{message.log_tail}\n")

    def lost(self, why: str) -> None:
        """Notes that the host is gone; the candidate is not to blame, and has another try."""
        self.exitcode = LOST
        self._keep(
            LastWords(failed=Failed(error=why, killed=True), unix_seconds=0.0)
        )  # before its peers' words

    def _keep(self, words: LastWords) -> None:
        (self._logs.folder / last_words(self._rank)).write_text(words.model_dump_json())


class HostsRun:
    """A `Run` whose ranks are on several hosts."""

    def __init__(self, launcher: Launcher, hosts: Hosts, number: int, task: Task, directory: Path) -> None:
        """Starts the ranks if all hosts are there, else when they are."""
        self._launcher, self._hosts, self._number = launcher, hosts, number
        self._task, self._directory = task, directory
        self._run: Run | None = None
        self._given_up = False
        self._start_if_complete()

    @property
    def ended(self) -> bool:
        """See `Run`."""
        return self._given_up if self._run is None else self._run.ended

    @property
    def sentinels(self) -> list[int]:
        """See `Run`."""
        return [] if self._run is None else self._run.sentinels

    def new_events(self) -> list[Event]:
        """See `Run`; none while a host is waited for."""
        if self._run is None and not self._given_up:
            self._start_if_complete()
        return [] if self._run is None else self._run.new_events()

    def kill(self) -> None:
        """See `Run`."""
        self._given_up = True
        if self._run is not None:
            self._run.kill()

    def _start_if_complete(self) -> None:
        self._hosts.hear()
        elsewhere = range(1, self._task.hosts)
        if not elsewhere or self._hosts.complete():
            self._run = self._started({host: self._hosts.members()[host] for host in elsewhere})

    def _started(self, members: dict[int, Member]) -> Run:
        """Returns the ranks, those of the first host first: should these fail to start, nobody waits for the
        others."""
        task, logs = self._prepared(members), self._task.logs(self._directory)
        elsewhere = [rank for host in members for rank in task.ranks_of(host)]
        forget_last_run(self._directory, elsewhere)
        ranks: list[LocalRank | RemoteRank] = [*self._launcher.ranks(task, self._directory)]
        for host, member in members.items():
            data = task.replace(host=host).to_dict()
            member.send(Start(run=self._number, task=data, folder=str(self._directory)))
            LOG.info("%s: ranks %s are on %s", self._directory, [*task.ranks_of(host)], member.words)
            ranks += [
                RemoteRank(member, self._hosts, self._number, rank, logs) for rank in task.ranks_of(host)
            ]
        return Run(ranks, logs, deadline_seconds=task.deadline_seconds)

    def _prepared(self, members: dict[int, Member]) -> Task:
        """Returns the task with a port of its own, absolute paths, and checkpoints only where all hosts can reach
        them."""
        shared = all(
            member.ready is not None and member.ready.shares_directory for member in members.values()
        )
        resume_from = self._task.resume_from if shared else None
        return self._task.replace(
            address=with_port(self._hosts.address, _free_port(self._hosts.address)) if members else None,
            log_directory=str(Path(self._task.log_directory).absolute()),
            resume_from=str(Path(resume_from).absolute()) if resume_from else None,
        )


def _free_port(address: str) -> int:
    """Returns a free port of this host: each candidate has its own, as the last one's may be closing still."""
    host, _ = host_and_port(address)
    with socket.socket(family_of(host)) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])
