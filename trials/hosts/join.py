"""What `dhen-search join` does: one of the other hosts of a study, which starts ranks as the first one says.

It knows no studies and decides nothing: it starts its ranks of a task, tells how each ended, and ends them when
told to, or when the first host is gone.
"""

from __future__ import annotations

import logging
import signal
import time
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from dhen.errors import UserError
from dhen.values import parse
from trials.data.cache import PreparedLog
from trials.events import Failed, LastWords, RankLogs
from trials.hosts.here import devices_here, versions_here
from trials.hosts.hosts import MARK, Say
from trials.hosts.wire import (
    GONE,
    Goodbye,
    Hello,
    Kill,
    Message,
    RankEnded,
    Ready,
    Refused,
    ShowStacks,
    Start,
    Welcome,
    Wire,
    connect,
)
from trials.processes.launcher import Launcher
from trials.processes.post_mortem import endings_of, memory_kills, tail
from trials.processes.rank_process import LocalRank
from trials.processes.task import Task

LOG = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


class Started(NamedTuple):
    """The ranks of one run on this host."""

    ranks: dict[int, LocalRank]
    logs: RankLogs
    memory_kills: int | None
    """Processes that the kernel had killed for want of memory when the ranks began."""


def join_study(address: str, host: int, name: str, seconds: float, say: Say) -> tuple[Wire, Welcome]:
    """Returns a connection to a study that welcomes this host; waits `seconds` for the study to be there.

    Raises:
        UserError: where no study is there, or it does not take this host.
    """
    wire = _reached(address, seconds, say)
    try:
        wire.answer()
        wire.send(Hello(host=host, name=name, versions=versions_here(), devices=devices_here()))
        answer = wire.receive()
    except GONE:
        raise _gone(address) from None
    if isinstance(answer, Refused):
        raise UserError(answer.reason)
    assert isinstance(answer, Welcome), answer
    return wire, answer


def _reached(address: str, seconds: float, say: Say) -> Wire:
    deadline, announced = time.monotonic() + seconds, False
    while True:
        try:
            return connect(address)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"nobody waits for hosts at {address} ({error.strerror or error}). Start the study on its "
                    f"first host, `dhen-search run ... ranks=HOSTSxRANKS address={address}`, then join again."
                ) from None
        if not announced:
            say(f"nobody waits for hosts at {address} yet; trying for {seconds:,.0f} s")
            announced = True
        time.sleep(RETRY_SECONDS)


def check_log(wire: Wire, welcome: Welcome) -> None:
    """Checks that this host has the study's log where the first host has it.

    Raises:
        UserError: where it has not; the first host is told.
    """
    path = Path(welcome.log_directory)
    try:
        log = PreparedLog.open(path)
        if log.fingerprint != welcome.log:
            raise UserError(f"{path} holds another log here than on the first host.")
    except UserError as error:
        reason = (
            f"{error} All hosts need the prepared log at the same path, on a file system that they share."
        )
        wire.send(Refused(reason=reason))
        raise UserError(reason) from None


class JoinedHost:
    """Starts and ends ranks on behalf of the first host."""

    def __init__(self, wire: Wire, welcome: Welcome, launcher: Launcher, logs: Path | None) -> None:
        """`logs` is a folder for the ranks' logs. None stands for the run's own directory if that is shared, else
        for a folder under `runs/`."""
        self._wire, self._launcher = wire, launcher
        shared = logs is None and _holds_mark(welcome)
        self.logs: Path | None = None if shared else logs or Path("runs") / Path(welcome.directory).name
        """Folder of the ranks' logs, if they are not in the run's directory."""
        self._runs: dict[int, Started] = {}

    def serve(self) -> str:
        """Does what the first host says until the study has ended; returns how it ended. No rank is left, whatever
        happens.

        Raises:
            UserError: where the first host is gone.
        """
        try:
            self._wire.send(Ready(shares_directory=self.logs is None))
            while True:
                connection.wait([self._wire.sentinel, *self._sentinels()])
                if self._wire.ready:
                    message = self._wire.receive()
                    if isinstance(message, Goodbye):
                        return message.reason
                    self._obey(message)
                self._tell_who_ended()
        except GONE:
            raise UserError(
                "the first host is gone, and the ranks here were ended. Run the study's command again there, "
                "and join again."
            ) from None
        finally:
            for run in list(self._runs):
                self._kill(run)

    def _sentinels(self) -> list[int]:
        return [rank.sentinel for run in self._runs.values() for rank in run.ranks.values()]

    def _obey(self, message: Message) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, ShowStacks) and message.run in self._runs:
            for rank in self._runs[message.run].ranks.values():
                rank.show_stack()
        elif isinstance(message, Kill) and message.run in self._runs:
            self._kill(message.run)

    def _start(self, message: Start) -> None:
        """Starts a task's ranks; a task that cannot be started here ends like one whose ranks fail."""
        folder = self.logs / Path(message.folder).name if self.logs else Path(message.folder)
        task = parse(Task, message.task, "the first host's task")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ranks = self._launcher.ranks(task, folder)
        except (OSError, UserError) as error:
            words = LastWords(failed=Failed(error=f"cannot start: {error}"), unix_seconds=time.time())
            for rank in task.ranks_here:
                self._tell(message.run, rank, 1, None, words, "")
            return
        its = dict(zip(task.ranks_here, ranks, strict=True))
        self._runs[message.run] = Started(its, task.logs(folder.absolute()), memory_kills())

    def _kill(self, run: int) -> None:
        for rank in self._runs[run].ranks.values():
            rank.kill()
        for rank in self._runs[run].ranks.values():
            rank.join()

    def _tell_who_ended(self) -> None:
        for number, run in list(self._runs.items()):
            for rank, process in list(run.ranks.items()):
                if not process.is_alive():
                    del run.ranks[rank]
                    assert process.exitcode is not None
                    words = _last_words(run, rank, process)
                    lines = tail(run.logs.path(rank))
                    self._tell(number, rank, process.exitcode, process.killed, words, lines)
            if not run.ranks:
                del self._runs[number]

    def _tell(
        self, run: int, rank: int, exitcode: int, killed: str | None, words: LastWords | None, lines: str
    ) -> None:
        LOG.info(
            "run %d: rank %d ended, exit code %d%s", run, rank, exitcode, f", {killed}" if killed else ""
        )
        self._wire.send(
            RankEnded(run=run, rank=rank, exitcode=exitcode, killed=killed, words=words, log_tail=lines)
        )


def _last_words(run: Started, rank: int, process: LocalRank) -> LastWords | None:
    """Returns a rank's last words; for one that was killed while this host's memory was short, what only this host
    can know."""
    (ending,) = endings_of({rank: process.exitcode}, {}, run.logs.folder)
    unasked = process.exitcode == -signal.SIGKILL and process.killed is None
    if unasked and memory_kills() != run.memory_kills:
        error = (
            "killed by signal 9 (SIGKILL), while the kernel of its host ended processes for want of memory"
        )
        return LastWords(failed=Failed(error=error, out_of_memory=True), unix_seconds=0.0)
    return ending.words


def _holds_mark(welcome: Welcome) -> bool:
    """Tells whether the run's directory is the same file system's here."""
    try:
        return (Path(welcome.directory) / MARK).read_text() == welcome.mark
    except OSError:
        return False


def _gone(address: str) -> UserError:
    return UserError(f"the first host, {address}, has hung up; see what its terminal says, and join again.")
