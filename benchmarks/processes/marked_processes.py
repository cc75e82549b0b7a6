"""The processes that a command has started, found by a mark in their environment, whoever their parent is now."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

MARK = "DHEN_SEARCH_BENCHMARK"
"""The variable that children inherit."""
SERVER = "multiprocessing.forkserver"
"""In the command line of the fork server, and of the ranks that are forked from it."""


class Process(NamedTuple):
    """One that runs; zombies have ended."""

    pid: int
    parent: int
    command: str

    def kill(self) -> None:
        """At once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def marked(mark: str) -> list[Process]:
    """All with this mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if state != "Z":
                    found.append(Process(int(folder.name), int(parent), command))
    return found


def servers(among: list[Process]) -> list[Process]:
    """Fork servers."""
    forked = [process for process in among if SERVER in process.command]
    pids = {process.pid for process in forked}
    return [process for process in forked if process.parent not in pids]


def ranks(among: list[Process]) -> list[Process]:
    """What fork servers have forked."""
    pids = {process.pid for process in servers(among)}
    return [process for process in among if process.parent in pids]


def wait_until_gone(mark: str, pids: set[int], seconds: float) -> set[int]:
    """Those of `pids` that still run after so many seconds."""
    deadline = time.monotonic() + seconds
    while left := pids & {process.pid for process in marked(mark)}:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return set()


def kill_all(mark: str) -> int:
    """Ends all with this mark; how many there were."""
    count = 0
    while found := marked(mark):
        for process in found:
            process.kill()
        count += len(found)
        time.sleep(0.05)
    return count
