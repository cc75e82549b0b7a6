"""Processes of one study, found by a mark in their environment, which all that they start inherit."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "DHEN_SEARCH_CHAOS"
"""The variable that holds the mark."""
FORK_SERVER = "multiprocessing.forkserver"
TRIAL = re.compile(r"/trials/(\d+)/[^/]*\.rank(\d+)\.log$")
SHARED_MEMORY = Path("/dev/shm")


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


def marked(mark: str) -> list[Process]:
    """Processes that live and carry the mark."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                found.append(Process(int(folder.name), int(parent), command))
    return found


def fork_servers(mark: str) -> list[int]:
    processes = {process.pid: process for process in marked(mark)}
    return [
        process.pid
        for process in processes.values()
        if FORK_SERVER in process.command
        and not (process.parent in processes and FORK_SERVER in processes[process.parent].command)
    ]


def ranks(mark: str) -> dict[int, int]:
    """Trial that each rank trains or scores, by process; ranks that have not opened their log yet are left out."""
    servers, found = set(fork_servers(mark)), {}
    for process in marked(mark):
        if process.parent in servers and (trial := _trial_of(process.pid)) is not None:
            found[process.pid] = trial
    return found


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; False where the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def left_after(mark: str, seconds: float) -> list[str]:
    """What still lives once so much time was given to end, in words; it is killed."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        send(process.pid, signal.SIGKILL)
    return [f"process {process.pid} is left: {process.command[:100]}" for process in left]


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def shared_memory_left(before: set[str]) -> list[str]:
    """Names in shared memory that are new since, and that no process holds: others work on this machine too."""
    new = shared_memory() - before
    if new:
        held = "".join(_maps_of(folder) for folder in Path("/proc").glob("[0-9]*"))
        new = {name for name in new if f"{SHARED_MEMORY}/{name}" not in held}
    return [f"{SHARED_MEMORY}/{name} is left" for name in sorted(new)]


def _maps_of(folder: Path) -> str:
    with suppress(OSError):
        return (folder / "maps").read_text()
    return ""


def rank_of(pid: int) -> int | None:
    """The number of a rank that trains; None where it does not, or is gone."""
    log = _log_of(pid)
    return int(log[2]) if log and "/attempt" in log[0] else None


def _trial_of(pid: int) -> int | None:
    """The trial whose log a rank writes."""
    log = _log_of(pid)
    return int(log[1]) if log else None


def _log_of(pid: int) -> re.Match[str] | None:
    with suppress(OSError):
        return TRIAL.search(os.readlink(f"/proc/{pid}/fd/1"))
    return None
