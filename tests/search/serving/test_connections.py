"""Connections of `serve` that never send a whole request: they end, and shut nobody out."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from search.serving import app, workers
from search.serving.app import make_app
from search.serving.workers import ClientConnection

LIMIT, HALF_OPEN = 8, 40
TIMEOUT_SECONDS = 120
HALF_HEADER = b"POST /invocations HTTP/1.1\r\nHost: here\r\n"
HALF_BODY = HALF_HEADER + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
BODY = json.dumps({"dataframe_records": []})


@contextmanager
def serving() -> Iterator[int]:
    """A server in this process whose model has no rows to score; its port."""
    schema = SimpleNamespace(inputs=(), columns={})
    scorer = SimpleNamespace(encoding=SimpleNamespace(schema=schema))
    model: Any = SimpleNamespace(served=SimpleNamespace(name="1-a", scorer=scorer))
    served = make_app(model, max_body_bytes=1000, token=None)
    server = uvicorn.Server(uvicorn.Config(served, http=ClientConnection, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True
            thread.join()


@contextmanager
def half_open(port: int, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    clients = [socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) for _ in range(count)]
    for client in clients:
        client.sendall(sent)
    yield clients
    for client in clients:
        client.close()


def wait_for_end(client: socket.socket) -> None:
    """Until the server ends the connection, unanswered."""
    with suppress(ConnectionResetError):
        assert client.recv(1) == b""


def ask(client: HTTPConnection, method: str, path: str, body: str | None = None) -> int:
    client.request(method, path, body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("sent", [b"", HALF_HEADER, HALF_BODY])
def test_half_open_connections_give_way_to_clients(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_CONNECTIONS", LIMIT)
    monkeypatch.setattr(workers, "REQUEST_SECONDS", 1e6)
    with serving() as port:
        client = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
        assert ask(client, "POST", "/invocations", BODY) == 200
        with half_open(port, HALF_OPEN, sent) as others:
            for other in others[: HALF_OPEN - LIMIT]:
                wait_for_end(other)
            # the same connection: one that was answered gives way after those that never were
            assert ask(client, "POST", "/invocations", BODY) == 200
            newcomer = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
            assert ask(newcomer, "GET", "/ping") == 200
        client.close()
        newcomer.close()


@pytest.mark.parametrize("sent", [b"", HALF_HEADER, HALF_BODY])
def test_a_request_that_is_not_whole_in_time_ends_its_connection(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "REQUEST_SECONDS", 0.1)
    with serving() as port, half_open(port, 3, sent) as clients:
        for client in clients:
            wait_for_end(client)


def test_what_waits_for_scores_is_bounded_and_ping_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is being scored is no reason to answer another kind of request late."""
    begun, goes_on = threading.Event(), threading.Event()

    def scored(*_: object) -> str:
        begun.set()
        assert goes_on.wait(TIMEOUT_SECONDS)
        return "{}"

    monkeypatch.setattr(app, "_scored", scored)
    monkeypatch.setattr(app, "MOST_REQUESTS", 1)
    with serving() as port:
        first, second = (HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS) for _ in range(2))
        first.request("POST", "/invocations", BODY)
        assert begun.wait(TIMEOUT_SECONDS)
        assert ask(second, "POST", "/invocations", BODY) == 503
        assert ask(second, "GET", "/ping") == 200
        goes_on.set()
        assert first.getresponse().status == 200
        monkeypatch.setattr(app, "HELD_BODIES", 0)
        assert ask(second, "POST", "/invocations", BODY) == 503
        first.close()
        second.close()
