"""Starts the server of `dhen-search ui`, which ends with its command, and asks it what it serves."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from search.http.listener import ANY, LOOPBACK, in_url
from search.live import end_with_parent
from search.live.settings import LISTENER, READY, VARIABLE, UiSettings

START_SECONDS = 120.0
"""Seconds to wait for MLflow, which is up in about six; a loaded machine may take far longer."""
LAST_LINES = 8
"""Lines of the server's own output, shown where it does not start."""
NOT_FOUND = 404


class Server(NamedTuple):
    """A server that answers."""

    address: str
    """Its address from this machine."""
    process: subprocess.Popen[bytes]
    token: str | None

    def get(self, path: str, data: dict[str, Any] | None = None) -> Any:
        """The body of the answer to a request, past any proxy, which could not reach this machine's address."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        body = None
        if data is not None:
            body, headers["Content-Type"] = json.dumps(data).encode(), "application/json"
        request = Request(f"{self.address}{path}", body, headers)
        with build_opener(ProxyHandler({})).open(request, timeout=START_SECONDS) as answer:
            return answer.read()

    def experiments(self) -> list[tuple[str, str]] | None:
        """Names and ids of the studies in MLflow's store; None where there is no store.

        Raises:
            RuntimeError: where MLflow does not answer, with its words.
        """
        try:
            self.get("/health")  # the first request: MLflow is loaded now
            wanted = {"max_results": 100, "filter": "name != 'Default'"}
            answer = json.loads(self.get("/api/2.0/mlflow/experiments/search", wanted))
        except HTTPError as error:
            if error.code == NOT_FOUND:
                return None
            raise RuntimeError(_text(error.read().decode(errors="replace"))) from None
        except (OSError, HTTPException) as error:
            raise RuntimeError(str(error)) from None
        return [(study["name"], study["experiment_id"]) for study in answer.get("experiments", [])]


@contextmanager
def started(settings: UiSettings, listener: socket.socket) -> Iterator[Server]:
    """A server that answers already; ended with all its processes on leaving.

    Raises:
        RuntimeError: with the server's last words, where it does not start.
    """
    ready, says_ready = os.pipe()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, end_with_parent.__file__, sys.executable, "-m", "search.live.serve"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                VARIABLE: settings.model_dump_json(),
                LISTENER: str(listener.fileno()),
                READY: str(says_ready),
                "PYTHONSAFEPATH": "1",
            },
            pass_fds=(listener.fileno(), says_ready),
            start_new_session=True,
        )
        # held by the server alone from here on: when it ends, whoever waits for it is told so
        listener.close()
        os.close(says_ready)
        try:
            _wait_until_it_answers(ready, process, output)
            host = LOOPBACK if settings.host in ANY else settings.host
            yield Server(f"http://{in_url(host)}:{settings.port}", process, settings.token)
        finally:
            os.close(ready)
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def names_of(host: str) -> tuple[str, ...]:
    """Names under which this server may be asked for, where it listens on `host`."""
    return () if host == LOOPBACK else tuple({host, socket.gethostname(), socket.getfqdn()} - set(ANY))


def _wait_until_it_answers(ready: int, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    """Waits for the byte that the server writes once it answers; its end is read as no byte."""
    said, _, _ = select.select([ready], [], [], START_SECONDS)
    if said and os.read(ready, 1):
        return
    output.seek(0)
    words = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    raise RuntimeError("the server did not start:\n" + "\n".join(words))


def _text(page: str) -> str:
    """What a small page of ours says."""
    _, _, rest = page.partition("<p>")
    return rest.partition("</p>")[0] or page.strip() or "no answer"
