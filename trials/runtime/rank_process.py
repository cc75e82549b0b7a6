"""A rank's process as its watchers see it: whether it lives, how it ended, and how to end it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from trials.records.events import START_MARK, FailureEvent, LastWords, Progress, RankLogs, last_words
from trials.store.user_cache import disk_full

# Logging of a rank: the standard library's `logging`, set up once in its process, into the rank's log file.
#
# The driver's lines (`search.logs`) have the same form, but for the rank. A line tells of what happens a few
# times in a training; nothing is logged per step.

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
ALL_IS_WELL = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO) ")
"""Pattern of the beginning of a line in this format that explains no failure."""
ROOMS = ("dhen", "trials")
"""Packages whose lines a rank's log has; of other libraries it has warnings."""


def log_to_stderr(name: str, *, debug: bool) -> None:
    """Sets this process up as a rank or a server of that name: what modules log goes to stderr, and
    Python's warnings with it."""
    of_rank = FORMAT.replace("%(name)s", f"{name} %(name)s")
    # force: what an imported library has set up does not count
    logging.basicConfig(level=logging.WARNING, format=of_rank, datefmt=DATE_FORMAT, force=True)
    for name in ROOMS:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    logging.captureWarnings(True)


# Why a candidate's processes ended: of all that died, the one that died first and by itself, in one sentence.
#
# A signal that nobody here sent comes before all else; then whoever said first why it ends. The others have
# lost a peer, and say so (gloo raises, NCCL may abort the process).

LAST_LINES = 5
"""Number of a dead process's last log lines that are kept with its error; lines that tell how well all goes are
left out."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
"""Signals that a process does not bring upon itself."""
TAIL_BYTES = 16_384
"""Bytes at the end of a log in which its last lines are looked for."""
STOPPED = "stopped"
"""Word for a process that a signal has stopped."""
STATES = {"T": STOPPED, "t": STOPPED, "D": "waiting for a device", "R": "running", "S": "waiting"}
"""Words for the states of a process, by the letter that /proc has for it."""
SERVER_GONE = 255
"""Text that multiprocessing has for all processes at once when the fork server was killed."""
SERVER_MEMORY = (
    "the memory of its host does not suffice for its part of the tables; more servers= have less each"
)
"""What is said of a server that was out of memory."""
DISK_FULL_CODE = errno.ENOSPC
"""Exit code of a rank that found no space for a file: it may have none to say so either."""
FRAME = re.compile(r'most recent call first\):\n  File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)')
"""Pattern of the innermost frame of a thread as faulthandler writes it."""


class RankExit(NamedTuple):
    """How one rank ended."""

    rank: int
    code: int | None
    """The rank's exit code; below 0 the signal that killed it."""
    killed: str | None
    """The state that the rank was in when it was killed from here; None if it was not."""
    words: LastWords | None

    @property
    def order(self) -> tuple[int, float]:
        """The order of endings: the smallest is the cause."""
        if self.killed is not None:
            return 4, 0.0
        if self.words is not None:
            return 1, self.words.unix_seconds
        if self.code == -signal.SIGABRT:  # libraries abort themselves when a peer is gone
            return 2, 0.0
        return (0, 0.0) if self.code else (3, 0.0)


def endings_of(codes: Mapping[int, int | None], killed: Mapping[int, str], folder: Path) -> list[RankExit]:
    """Returns the endings of all ranks that are gone: exit codes, states of those that were killed from here,
    their last words."""
    endings = []
    for rank, code in codes.items():
        words = None
        with contextlib.suppress(OSError, ValidationError):  # none, or it was killed while it wrote
            words = LastWords.model_validate_json((folder / last_words(rank)).read_bytes())
        endings.append(RankExit(rank, code, killed.get(rank), words))
    return endings


def memory_kills() -> int | None:
    """Returns how many processes the kernel has killed since it began because memory was short; None if it does
    not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def verdict(
    endings: list[RankExit],
    progress: Progress | None,
    logs: RankLogs,
    hung_seconds: float | None,
    *,
    memory_was_short: bool = False,
) -> FailureEvent:
    """Returns the one reason for all endings; `memory_was_short` says that the kernel has killed processes for
    that meanwhile."""
    at = (
        f"after {progress.examples:,} of {progress.total_examples:,} examples" if progress else "at the start"
    )
    if hung_seconds is not None:  # the rank that stands still, or what each rank waits for
        stopped = [ending.rank for ending in endings if ending.killed == STOPPED]
        states = list[str]()
        for ending in endings:
            frames = [] if ending.killed == STOPPED else FRAME.findall(tail(logs.path(ending.rank)))
            frame = " in {2} ({0}:{1})".format(*frames[-1]) if frames else ""
            states.append(f"{logs.words(ending.rank)} {ending.killed or how(ending)}{frame}")
        waited_for = ""
        if stopped and len(stopped) < len(endings):
            named = " and ".join(map(logs.words, stopped))
            are = "is" if len(stopped) == 1 else "are"
            waited_for = f"; the others wait for {named}, which {are} stopped"
        error = f"no progress for {hung_seconds:,.1f} s, {at}: {', '.join(states)}{waited_for}"
        stacks = f"; the stacks are in the ranks' logs, {logs.name}.*.log"
        return FailureEvent(
            error=error + (_log(logs, stopped[0]) if stopped else stacks), stopped=bool(stopped)
        )
    cause = min(endings, key=lambda ending: ending.order)
    if any(ending.code == DISK_FULL_CODE for ending in endings):
        said = (ending.words.failed.error for ending in endings if ending.words)
        return FailureEvent(error=next(said, None) or str(disk_full(logs.folder)), disk_full=True)
    subject = logs.words(cause.rank) if len(endings) > 1 else "the training process"
    if cause.code == SERVER_GONE and cause.words is None:
        return FailureEvent(
            error=f"the fork server, which starts and ends all ranks, was killed {at}", killed=True
        )
    late = [f"{logs.words(e.rank)} was {e.killed}" for e in endings if e.killed and e is not cause]
    late_ranks = "".join(f"; {late_rank} and had to be killed" for late_rank in late)
    unasked = cause.words is None and cause.killed is None
    by_kernel = memory_was_short and unasked and cause.code == -signal.SIGKILL
    from_outside = unasked and not by_kernel and -(cause.code or 0) in FROM_OUTSIDE
    if logs.server(cause.rank) is not None:
        # what memory a server lacked is not the ranks': no strategy that takes less of theirs would help
        words = cause.words.failed if cause.words else FailureEvent(error="")
        starved = words.out_of_memory or by_kernel
        ended = f"failed {at}: {words.error}" if words.error else f"{how(cause)} {at}"
        unsaved = progress.unsaved_steps if progress else None
        lost = (
            f"; the updates of {unsaved:,} step(s) since its newest checkpoint are lost with it, and made again"
            if unsaved
            else ""
        )
        log = "" if starved else _log(logs, cause.rank, but=ended.rpartition(": ")[2].partition("\n")[0])
        memory = f"; {SERVER_MEMORY}" if starved else ""
        return FailureEvent(
            error=f"{subject} {ended}{memory}{lost}{late_ranks}{log}",
            killed=words.killed or from_outside,
            host_left=words.host_left,
            of_server=True,
        )
    if cause.words is None:
        error = f"{subject} {how(cause)} {at}{late_ranks}{_log(logs, cause.rank)}"
        return FailureEvent(error=error, out_of_memory=by_kernel, killed=from_outside)
    failed = cause.words.failed
    if failed.needed_bytes is not None:  # ranks that lack memory do so within moments of each other
        needs = [ending.words.failed.needed_bytes or 0 for ending in endings if ending.words]
        failed = failed.replace(needed_bytes=max(needs))
    # of memory, the words say it all; a log would end with where in our counter it was noticed
    log = "" if failed.out_of_memory else _log(logs, cause.rank, but=failed.error.partition("\n")[0])
    return failed.replace(error=f"{subject} failed {at}: {failed.error}{late_ranks}{log}")


def state_of(pid: int | None) -> str:
    """Returns what a process does, in a word."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "alive"
    return STATES.get(stat.rsplit(")", 1)[1].split()[0], "alive")


def how(ending: RankExit) -> str:
    """Returns how a process ended, in words that follow its name."""
    if ending.killed is not None:
        return "was stopped by a signal, and was ended" if ending.killed == STOPPED else "was ended"
    code = ending.code
    if code is None or code >= 0:
        return f"ended without a result (exit code {code})"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


def _log(logs: RankLogs, rank: int, *, but: str | None = None) -> str:
    """Returns the lines at the end of a log that may say why, or where to look."""
    lines = [line for line in tail(logs.path(rank)).splitlines() if line.strip()]
    lines = [line for line in lines if not ALL_IS_WELL.match(line)]
    lines = [line for line in lines if but is None or not line.endswith(but)][-LAST_LINES:]
    if lines:
        return f"; {logs.path(rank).name} ends: " + " | ".join(lines)
    return f"; its log is {logs.path(rank).name}" if logs.path(rank).exists() else ""


def tail(log: Path) -> str:
    """Returns the end of what the last process that wrote to this file has printed, below its mark."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    _, mark, printed = text.rpartition(START_MARK)
    return printed.partition("\n")[2] if mark else printed


class RankProcess(Protocol):
    """The process of a rank, on this machine or on another."""

    killed: str | None
    """The state that the process was in when `kill` ended it; None if it was not."""

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: ready once the process may have ended."""

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process lives; below 0 the signal that ended it."""

    def is_alive(self) -> bool:
        """Tells whether the process has not ended yet."""

    def is_stopped(self) -> bool:
        """Tells whether a signal (SIGSTOP) has stopped the process, as far as that can be seen from here."""

    def show_stack(self) -> None:
        """Asks the process to write the stacks of its threads into its log."""

    def kill(self) -> None:
        """Ends the process; `join` waits for that."""

    def join(self) -> None:
        """Waits for the end of the process."""


class LocalRank:
    """The process of a rank on this machine."""

    def __init__(self, process: BaseProcess, device: str | None = None) -> None:
        """Takes over a process that was started, with the id of the CUDA device that it was given, if any."""
        self._process, self.device, self.sentinel = process, device, process.sentinel
        self.killed: str | None = None

    @property
    def exitcode(self) -> int | None:
        """See `RankProcess`."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        """See `RankProcess`."""
        return self._process.is_alive()

    def is_stopped(self) -> bool:
        """See `RankProcess`."""
        return self.is_alive() and state_of(self._process.pid) == STOPPED

    def show_stack(self) -> None:
        """See `RankProcess`."""
        pid = self._process.pid
        if pid is not None and self.is_alive():
            os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        """See `RankProcess`."""
        if self.is_alive():
            self.killed = state_of(self._process.pid)
            self._process.kill()

    def join(self) -> None:
        """See `RankProcess`."""
        self._process.join()
