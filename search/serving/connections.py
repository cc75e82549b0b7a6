"""A worker's connections: those that send no whole request end in time, or sooner if there are too many.

uvicorn itself answers 503 to everybody once it has as many connections as it may, so that they shut others out.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 30.0
"""Seconds in which header and body of a request have to be whole."""
MOST_CONNECTIONS = 1000
"""Connections of a worker at a time. Beyond them the one ends that has waited for its request the longest; those
that were answered before come last."""
OPEN_FILES = 4096
"""File descriptors of a worker: uvicorn may take 2,048 connections more before the first of them can end."""


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
