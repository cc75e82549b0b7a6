"""The workers of a server: started from one fork server, started again when they die, ended together.

They share one listening socket, so the system gives each connection to one that is free, and none is lost while
another worker starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

from dhen.errors import UserError
from search.serving.worker import GRACE_SECONDS, Refused, ServeSettings, main
from trials.runtime.fork_server import server_environment, without_main

PRELOADED = ("search.serving.app", "search.serving.worker", "pandas")
RESTART_SECONDS = 1.0
"""Pause before a worker that died is started again, so that one that dies at once does not take a core."""


class _Worker(NamedTuple):
    process: ForkServerProcess
    pipe: Connection
    """From the worker: `Ready` or `Refused`, once."""


class Workers:
    """The processes that answer on a socket."""

    def __init__(self, settings: ServeSettings, listener: socket.socket, count: int) -> None:
        """Starts them, and waits until they are about to answer.

        Raises:
            UserError: if the bundle cannot be served.
        """
        self._settings, self._listener = settings, listener
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._start()
            versions = [_heard(worker) for worker in self._workers]
            self.version = versions[0]
            """The version that they began with."""
        except BaseException:
            self.end()
            raise

    def watch(self) -> Iterator[str]:
        """Starts workers again that die, for ever; yields in words what has happened."""
        while True:
            connection.wait([worker.process.sentinel for worker in self._workers])
            for worker in [one for one in self._workers if not one.process.is_alive()]:
                self._workers.remove(worker)
                why = f"exit code {worker.process.exitcode}"
                with contextlib.suppress(EOFError):
                    while worker.pipe.poll():
                        message = worker.pipe.recv()
                        why = message.reason if isinstance(message, Refused) else why
                yield f"worker {worker.process.pid} ended: {why}; another one starts"
                time.sleep(RESTART_SECONDS)
                self._start()

    def end(self) -> None:
        """Ends all workers: they answer what they have begun to, and are killed where that takes too long."""
        processes = [worker.process for worker in self._workers]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> None:
        here, there = multiprocessing.Pipe(duplex=False)
        arguments = (self._settings, self._listener, there)
        process: Any = self._context.Process(target=main, args=arguments, daemon=True)
        with server_environment(), without_main():
            process.start()
        there.close()
        self._workers.append(_Worker(process, here))


def _heard(worker: _Worker) -> str:
    """Returns the version that a worker serves, once it has it."""
    try:
        message = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        raise RuntimeError(
            f"a worker ended with exit code {worker.process.exitcode} before it could answer"
        ) from None
    if isinstance(message, Refused):
        raise UserError(message.reason)
    return str(message.version)
