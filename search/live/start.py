"""Starts the server of `dhen-search ui`, which ends with its command, and asks it what it serves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from dhen.errors import UserError
from search import end_with_parent
from search.live.settings import LOOPBACK, VARIABLE, UiSettings

USUAL_PORT = 5000
START_SECONDS = 120.0
"""Seconds to wait for MLflow, which is up in about six; a loaded machine may take far longer."""
LAST_LINES = 8
"""Lines of the server's own output, shown where it does not start."""
NOT_FOUND = 404
ANY = ("0.0.0.0", "::")
"""Addresses that stand for all of this machine's."""


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
def started(settings: UiSettings) -> Iterator[Server]:
    """A server that answers already; ended with all its processes on leaving.

    Raises:
        RuntimeError: with the server's last words, where it does not start.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, end_with_parent.__file__, sys.executable, "-m", "search.live.serve"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: settings.model_dump_json(), "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        try:
            host = LOOPBACK if settings.host in ANY else settings.host
            _wait_until_it_listens(host, settings.port, process, output)
            yield Server(f"http://{_in_url(host)}:{settings.port}", process, settings.token)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def free_port(host: str, wanted: int | None) -> int:
    """The wanted port; where none is wanted, the usual port or any that is free.

    Raises:
        UserError: where the port is taken, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (wanted,) if wanted else (USUAL_PORT, 0):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except socket.gaierror:
                raise UserError(
                    f"--host {host}: no such host; give an address of this machine, such as 0.0.0.0."
                ) from None
            except OSError:
                continue
            return int(probe.getsockname()[1])
    if wanted is None:
        raise UserError(f"--host {host} is no address of this machine; 127.0.0.1 or 0.0.0.0 would work.")
    raise UserError(f"port {wanted} is taken or not allowed; leave --port out to have a free one picked.")


def names_of(host: str) -> tuple[str, ...]:
    """Names under which this server may be asked for, where it listens on `host`."""
    return () if host == LOOPBACK else tuple({host, socket.gethostname(), socket.getfqdn()} - set(ANY))


def shown_address(host: str, port: int) -> str:
    """The address to open in a browser, on another machine where the server listens there."""
    return f"http://{_in_url(socket.gethostname() if host in ANY else host)}:{port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _wait_until_it_listens(host: str, port: int, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    output.seek(0)
    words = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    raise RuntimeError("the server did not start:\n" + "\n".join(words))


def _text(page: str) -> str:
    """What a small page of ours says."""
    _, _, rest = page.partition("<p>")
    return rest.partition("</p>")[0] or page.strip() or "no answer"
