"""A worker's connections: how long one may take to send a request, and which one ends if there are too many.

uvicorn answers 503 to everybody once its limit of connections is reached: those that never send a whole request
would shut others out. Here they give way instead. Beyond the limit the one ends that has waited for its request
the longest; those that were answered before come last.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from search.serving.settings import GRACE_SECONDS

REQUEST_SECONDS = 30.0
"""Seconds in which header and body of a request have to be whole; then its connection ends."""
MOST_CONNECTIONS = 1000
"""Connections of a worker at a time, beyond which those that wait for a request give way."""
BACKLOG = 2048
"""Connections that the system holds until they are taken; all of them may be taken at once."""
OTHER_FILES = 200
"""File descriptors for what is no connection."""


class Connection(H11Protocol):
    """A connection that ends if a request is not whole in time."""

    most = MOST_CONNECTIONS
    seconds = REQUEST_SECONDS

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        """When it ends; None while it has a whole request, which is being answered."""
        self._was_answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes it in; if it is one too many, the one that gives way ends."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            waiting = [one for one in self.connections if isinstance(one, Connection) and one._deadline]
            if waiting:
                min(waiting, key=Connection._rank)._end()
        self._wait_for_request()

    def handle_events(self) -> None:
        """Takes what has come; the time for the rest of a request does not begin anew."""
        super().handle_events()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._wait_for_request()
        else:
            self._wait_no_more()

    def on_response_complete(self) -> None:
        """Goes on to the next request."""
        self._was_answered = True
        self._wait_no_more()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leaves nothing behind."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _rank(self) -> tuple[bool, float]:
        return self._was_answered, self._deadline.when() if self._deadline else 0.0

    def _wait_for_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self._end)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        self._wait_no_more()
        self.connections.discard(self)  # of several that come at once each has another one end
        self.transport.abort()


def server_of(app: Any, connection: type[Connection] = Connection) -> uvicorn.Server:
    """Returns a server of an ASGI app whose connections are of this kind; a test has one with smaller limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connection.most + BACKLOG + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    config = uvicorn.Config(
        app,
        http=connection,
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_SECONDS),
    )
    return uvicorn.Server(config)
