"""Servers as users start them, and clients that ask them."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from command_line import COMMAND, TIMEOUT_SECONDS

JSON, CSV = "application/json", "text/csv"


class Answer(NamedTuple):
    status: int
    version: str
    data: Any


class Server:
    """A process of `dhen-search serve`, and what it says."""

    def __init__(self, words: tuple[object, ...], environment: dict[str, str], folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._log = folder / f"serve-{self.port}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [str(COMMAND), "serve", *map(str, words), "--port", str(self.port)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._log.read_text()

    def post(
        self, body: object, content_type: str = JSON, path: str = "/invocations", token: str = ""
    ) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, content_type, token)

    def ask(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "", token: str = ""
    ) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        headers = {"Content-Type": content_type, "Authorization": token and f"Bearer {token}"}
        connection.request(method, path, body, {name: value for name, value in headers.items() if value})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        data = json.loads(text) if answer.headers["Content-Type"] == JSON and text.strip() else text
        return Answer(answer.status, answer.headers["X-Model-Version"], data)

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if what():
                return
            assert self.process.poll() is None, self.said()
            time.sleep(0.05)
        raise AssertionError(f"it did not come so far:\n{self.said()}")

    def until_all_serve(self, version: str) -> None:
        """Until a version answers forty requests, eight at a time, so that surely no worker has another one: of
        requests one by one a worker that is busy takes none."""

        def asked(_: int) -> bool:
            return self.ask("GET", "/ping").version == version

        with ThreadPoolExecutor(8) as pool:
            self.until(lambda: all(list(pool.map(asked, range(40)))))

    def workers(self) -> list[int]:
        """Those that answer: the fork server's children, which is a child of the command."""
        parents = session(self.process.pid)
        return [pid for pid, parent in parents.items() if parent in parents and parent != self.process.pid]


def session(leader: int) -> dict[int, int]:
    """Processes of a session that live, and the parent of each."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, _, of_session = stat.rpartition(")")[2].split()[:4]
        if int(of_session) == leader and state != "Z":
            found[int(folder.name)] = int(parent)
    return found


def wait_until_gone(leader: int) -> None:
    """Until no process of a session lives."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert session(leader) == {}


@contextmanager
def asked_all_the_time(server: Server, body: object) -> Iterator[list[Answer]]:
    """Answers to a body that is sent again and again, from several threads, while the block runs."""
    answers: list[Answer] = []
    failures: list[Exception] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                answers.append(server.post(body))
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
