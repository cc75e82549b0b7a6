"""Servers as users start them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from servers.served import Server, session

Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server that answers already; all its processes are ended on leaving."""

    @contextmanager
    def started(*words: object) -> Iterator[Server]:
        server = Server(words, environment, tmp_path_factory.mktemp("server"))
        try:
            server.until(lambda: " answers at " in server.said())
            yield server
        finally:
            for pid in session(server.process.pid):
                os.kill(pid, signal.SIGKILL)
            server.process.wait()

    return started
