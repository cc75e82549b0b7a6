"""A host of a study whose ranks add up numbers and misbehave as their folder's name says (see `faulty_ranks`)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from faulty_ranks import HOSTS, RANKS_PER_HOST, rank_main

from trials.data.cache import PreparedLog
from trials.hosts.hosts import Hosts
from trials.hosts.join import JoinedHost, check_log, join_study
from trials.processes.launcher import Launcher
from trials.processes.rank_process import LocalRank
from trials.processes.task import Task

ENDLESS = "endless"


class FaultyLauncher(Launcher):
    """Its ranks run `faulty_ranks.add_up`."""

    def ranks(self, task: Task, directory: Path) -> list[LocalRank]:
        steps = 1_000_000 if directory.name == ENDLESS else 10
        return self._fork(partial(rank_main, directory.name, steps), task, directory)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def first_host(log: PreparedLog, directory: Path, said: list[str]) -> Hosts:
    """That hosts can join."""
    hosts = Hosts(free_address(), HOSTS, RANKS_PER_HOST, said.append)
    hosts.open(log, directory)
    return hosts


def start_joining(address: str, logs: Path | None = None) -> subprocess.Popen[bytes]:
    """Another host, on this machine."""
    call = f"faulty_hosts.join({address!r}, {str(logs) if logs else None!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"import faulty_hosts; {call}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )


def join(address: str, logs: str | None) -> None:
    """What the other host does."""
    launcher = FaultyLauncher()
    launcher.warm_up()
    wire, welcome = join_study(address, 1, "another machine", 60.0, print)
    check_log(wire, welcome)
    JoinedHost(wire, welcome, launcher, Path(logs) if logs else None).serve()
