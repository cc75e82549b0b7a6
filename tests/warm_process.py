"""The command line in processes of its own, forked from one that has imported it.

A fresh interpreter takes ten seconds of a core for torch, MLflow and the like. Each process has its own session,
environment and folder, and ends as one that a shell has started. The fork server that its trainings come from,
which would import torch once more, is a fork of it too. What only a fresh interpreter shows (`PYTHONPATH`, what is
imported) needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import util
from pathlib import Path
from threading import Thread
from typing import Any

COMMAND_LINE = "from search.cli import main; main()"
HEAVY = (
    *(
        "mlflow",
        "optuna",
        "plotly.graph_objects",
        "scipy.stats",
        "search.analysis.confirm",
        "search.bundles.scorer",
    ),
    *("search.bundles.online", "search.samplers.ask_tell", "search.study.run_session"),
)
"""Modules that verbs import late."""
NUMBER = struct.Struct("!i")


class WarmProcess:
    """A process that runs Python code, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        words: Iterable[object],
        environment: Mapping[str, str],
        *,
        code: str = COMMAND_LINE,
        cwd: object = None,
    ) -> None:
        request = {"words": [*map(str, words)], "environment": {**environment}, "code": code}
        text = json.dumps(request | {"folder": str(cwd or Path.cwd())}).encode()
        (out, its_out), (errors, its_errors), (self._told, its_end) = os.pipe(), os.pipe(), os.pipe()
        starter, theirs = _starter(os.getpid()), [its_out, its_errors, its_end]
        socket.send_fds(starter, [NUMBER.pack(len(text))], theirs)
        starter.sendall(text)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdout, self.stderr = (TextIOWrapper(os.fdopen(each, "rb")) for each in (out, errors))
        (self.pid,) = NUMBER.unpack(os.read(self._told, NUMBER.size))
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0.0) -> int | None:
        """How it has ended, if it has within these seconds: its exit code, or the negative number of a signal."""
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            (self.returncode,) = NUMBER.unpack(os.read(self._told, NUMBER.size))
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it still prints, on both streams, until nobody holds them."""
        printed = {}

        def read(name: str, stream: TextIOWrapper) -> None:
            with stream:
                printed[name] = stream.read()

        streams = {"out": self.stdout, "errors": self.stderr}
        readers = [Thread(target=read, args=each, daemon=True) for each in streams.items()]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return printed["out"], printed["errors"]

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _starter(_: int) -> socket.socket:
    """The way to the process that has imported everything, which ends with this one."""
    ours, its = socket.socketpair()
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", "import warm_process; exec(warm_process.serve())", str(its.fileno())],
        pass_fds=[its.fileno()],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    its.close()
    for end in (ours.close, process.wait, process.kill):  # called in the opposite order
        atexit.register(end)
    return ours


def serve() -> str:
    """Forks a process for each request; returns in such a one, and in its fork server, with the code to run."""
    starter = socket.socket(fileno=int(sys.argv[1]))
    os.environ |= import_module("search.mlflow.store").ENVIRONMENT
    for module in (*HEAVY, *import_module("trials.runtime.launcher").PRELOADED):
        import_module(module)
    import_module("search.execution.trainer").cores = lambda: 1  # as in `tests/search/conftest.py`
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, descriptors, _, _ = socket.recv_fds(starter, NUMBER.size, 3)
        if not head:
            os._exit(0)
        (length,), text = NUMBER.unpack(head), b""
        while len(text) < length:
            text += starter.recv(length - len(text))
        if os.fork() == 0:
            starter.close()
            _keep(*descriptors)
            return _become(json.loads(text))
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(out: int, errors: int, told: int) -> None:
    """Forks the process itself, in which alone this returns, and tells how that one has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid != 0:
        os.close(out)
        os.close(errors)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(told, NUMBER.pack(code))
        os._exit(0)
    os.setsid()
    os.write(told, NUMBER.pack(os.getpid()))
    os.dup2(out, 1)
    os.dup2(errors, 2)
    for descriptor in (out, errors, told):
        os.close(descriptor)


def _become(request: dict[str, Any]) -> str:
    """Makes this process one that a shell has started in a folder with these words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = ["dhen-search", *request["words"]]
    sys.path[:] = filter(None, sys.path)
    return _fork_server_beside() or str(request["code"])


def _fork_server_beside() -> str | None:
    """Forks a process that waits until this one starts a fork server, and returns there the code of that."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        text, descriptors, _, _ = socket.recv_fds(its, 2**20, 2)
        if not text:
            os._exit(0)
        its.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which ranks get back
        start = json.loads(text)
        os.environ.clear()
        os.environ.update(start["environment"])
        os.chdir(start["folder"])
        listener, alive = descriptors
        code = re.sub(r"main\(\d+, \d+", f"main({listener}, {alive}", start["code"])
        worker = import_module("trials.runtime.worker")  # what it does when a fork server imports it
        worker.FORK_SERVER = os.getpid()
        worker.tidy_up_at_exit()
        return code
    its.close()
    spawn = util.spawnv_passfds

    def start(program: bytes, words: Sequence[str], descriptors: Sequence[int]) -> int:
        if "forkserver" not in words[-1]:
            return spawn(program, words, descriptors)
        util.spawnv_passfds = spawn  # a second one is started as usual
        started = {"code": words[-1], "environment": {**os.environ}, "folder": os.getcwd()}
        with ours:
            socket.send_fds(ours, [json.dumps(started).encode()], descriptors)
        return pid

    util.spawnv_passfds = start
    return None
