"""The workers of a server: started from one fork server, started again when they die, ended together.

They share one listening socket, so the system gives each connection to one that is free, and none is lost while
another worker starts. Each reads the bundle itself, and ends when it is told, or its parent is gone.

Connections that send no whole request end in time, or sooner if there are too many. uvicorn itself answers 503 to
everybody once it has as many connections as it may, so that they shut others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dhen.errors import UserError
from trials.runtime.fork_server import server_environment, without_main
from trials.runtime.rank_process import DATE_FORMAT, FORMAT

BACKLOG = 128
"""Connections that wait to be accepted. All are accepted in one turn, before anybody is answered, so this bounds
how much a flood of new ones slows others down (`docs/benchmarks/serving.md`)."""
REQUEST_SECONDS = 30.0
"""Seconds in which header and body of a request have to be whole."""
MOST_CONNECTIONS = 1000
"""Connections of a worker at a time. Beyond them the one ends that has waited for its request the longest; those
that were answered before come last."""
OPEN_FILES = 4096
"""File descriptors of a worker: uvicorn may take 2,048 connections more before the first of them can end."""
GRACE_SECONDS = 30.0
"""Seconds that requests which are being answered may still take when the server ends."""


class ServeSettings(NamedTuple):
    """How a bundle is served."""

    bundle: Path
    mapped: bool
    """Whether the weights stay in their files."""
    threads: int
    """Torch's threads in each worker."""
    max_body_bytes: int
    token: str | None
    """What clients must show; None if this machine alone is answered."""


class BundleRefusal(NamedTuple):
    """A worker cannot serve the bundle."""

    reason: str


def main(settings: ServeSettings, listener: socket.socket, parent: Connection) -> None:
    """Answers until the parent ends it; sends the parent the version that it serves, or the reason for none."""
    import torch  # the parent needs none of these

    from search.serving.app import LiveModel, make_app

    logging.basicConfig(level=logging.WARNING, format=FORMAT, datefmt=DATE_FORMAT, stream=sys.stderr)
    allow_open_files()
    torch.set_num_threads(settings.threads)
    try:
        model = LiveModel(settings.bundle, mapped=settings.mapped)
    except UserError as error:
        parent.send(BundleRefusal(str(error)))
        return
    app = make_app(model, max_body_bytes=settings.max_body_bytes, token=settings.token)
    config = uvicorn.Config(
        app,
        http=ClientConnection,
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_SECONDS),
    )
    server = uvicorn.Server(config)

    def end_with_parent() -> None:
        process = multiprocessing.parent_process()
        assert process is not None
        process.join()
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True, name="parent").start()
    model.watch()
    parent.send(model.served.name)
    # uvicorn raises the signal that ended it once more when all is answered
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    server.run(sockets=[listener])


class ClientConnection(H11Protocol):
    """A connection that ends if a request is not whole in time."""

    _unanswered: ClassVar[OrderedDict[ClientConnection, None]] = OrderedDict()
    """This process's connections that wait for their first request, the longest waiting first."""
    _answered: ClassVar[OrderedDict[ClientConnection, None]] = OrderedDict()
    """Those that wait for a later one."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._deadline: asyncio.TimerHandle | None = None  # none while a whole request is answered
        self._queue = self._unanswered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes it in; if it is one too many, another ends."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS and (waiting := self._unanswered or self._answered):
            next(iter(waiting))._end()
        self._wait(True)

    def handle_events(self) -> None:
        """Takes what has come; the time for the rest of a request does not begin anew."""
        super().handle_events()
        self._wait(self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing())

    def on_response_complete(self) -> None:
        """Goes on to the next request."""
        self._wait(False)
        self._queue = self._answered
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leaves no timer behind."""
        self._wait(False)
        super().connection_lost(exc)

    def _wait(self, waits: bool) -> None:
        if waits and self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end)
            self._queue[self] = None
        elif not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            del self._queue[self]

    def _end(self) -> None:
        self._wait(False)
        self.connections.discard(self)  # now: if several come at once, each has another one end
        self.transport.abort()


def allow_open_files() -> None:
    """Raises this process's limit of file descriptors to what connections take, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# The processes together.

PRELOADED = ("search.serving.app", "search.serving.workers", "pandas")
RESTART_SECONDS = 1.0
"""Pause before a worker that died is started again, so that one that dies at once does not take a core."""


class _Worker(NamedTuple):
    process: ForkServerProcess
    pipe: Connection
    """From the worker, once: the version that it serves, or `BundleRefusal`."""


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
                        why = message.reason if isinstance(message, BundleRefusal) else why
                yield f"worker {worker.process.pid} ended: {why}; another one starts"
                time.sleep(RESTART_SECONDS)
                self._start()

    def end(self) -> None:
        """Ends all workers: they answer what they have begun to, and are killed if that takes too long."""
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
    if isinstance(message, BundleRefusal):
        raise UserError(message.reason)
    return str(message)
