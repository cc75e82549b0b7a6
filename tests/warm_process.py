"""The command line in processes of its own, forked from one that has imported it.

A fresh interpreter takes ten seconds of a core for torch, MLflow and the like. Each process has its own session,
environment and folder, and ends as one that a shell has started. What only a fresh interpreter shows
(`PYTHONPATH`, what is imported) needs `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from io import TextIOWrapper
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
    """Forks a process for each request; returns in such a one alone, with the code that it is to run."""
    starter = socket.socket(fileno=int(sys.argv[1]))
    os.environ |= import_module("search.mlflow.store").ENVIRONMENT
    for module in HEAVY:
        import_module(module)
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
    return str(request["code"])
