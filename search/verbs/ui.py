"""`ui`: browse a study's runs in MLflow, on this machine alone."""

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
from pathlib import Path
from typing import IO, Any
from urllib.request import ProxyHandler, Request, build_opener

import click

from dhen.errors import UserError
from search import end_with_parent
from trials.mlflow.store import ENVIRONMENT, artifacts, check_store, database, store_uri
from trials.mlflow.view import VIEW, view_link

HOST = "127.0.0.1"
USUAL_PORT = 5000
START_SECONDS = 120.0
"""Seconds to wait for MLflow, which is up in about six; a loaded machine may take far longer."""
LAST_LINES = 8
"""Lines of the server's own output, shown where it does not start."""


@click.command(epilog="Example: dhen-search ui runs/demo --port 5001")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 5000, or a free one if that is taken.")
def command(directory: Path, port: int | None) -> None:
    """Browse the study in DIRECTORY in MLflow: its trials, their curves and files. Ctrl-C ends it.

    The server listens on 127.0.0.1 alone and reports to no one.
    """
    _require_store(directory)
    click.echo("MLflow starts, this takes some seconds ...")
    try:
        with mlflow_server(directory, _port(port)) as (address, server):
            for name, identity in _experiments(address):
                click.echo(f"study {name}, by NE: {address}/{view_link(identity, VIEW)}")
            click.echo(f"MLflow answers at {address} (Ctrl-C ends it)")
            server.wait()
    except KeyboardInterrupt:
        click.echo("\nended.")
        return
    raise RuntimeError(f"the MLflow server at {address} ended by itself with exit code {server.returncode}")


@contextmanager
def mlflow_server(directory: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server on this study's store that answers already; ended with all its processes on leaving.

    Raises:
        RuntimeError: with the server's last words, where it does not start.
    """
    mlflow = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", HOST, "--port", str(port)]
    store = ["--backend-store-uri", store_uri(directory), "--default-artifact-root", _uri(directory)]
    quiet = {**ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            [sys.executable, end_with_parent.__file__, *mlflow, *store],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet},
            start_new_session=True,
        )
        try:
            address = f"http://{HOST}:{port}"
            _wait_until_it_answers(address, server, output)
            yield address, server
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()


def _require_store(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give the one of a run, e.g. runs/demo.")
    if not database(directory).exists():
        raise UserError(
            f"{directory}: nothing to browse, there is no {database(directory).name}. "
            f"`dhen-search run --out {directory}` starts a study there, or brings its MLflow up to date."
        )
    check_store(directory)


def _uri(directory: Path) -> str:
    return artifacts(directory).absolute().as_uri()


def _port(wanted: int | None) -> int:
    """The wanted port; where none is wanted, the usual port or any that is free."""
    for port in (wanted,) if wanted else (USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(f"port {wanted} is taken or not allowed; leave --port out to have a free one picked.")


def _wait_until_it_answers(address: str, server: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            _get(f"{address}/health")
        except (OSError, HTTPException):
            time.sleep(0.2)
        else:
            return
    output.seek(0)
    words = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    raise RuntimeError("the MLflow server did not start:\n" + "\n".join(words))


def _experiments(address: str) -> list[tuple[str, str]]:
    """Names and ids of the studies in the store."""
    body = json.dumps({"max_results": 100, "filter": "name != 'Default'"}).encode()
    url = f"{address}/api/2.0/mlflow/experiments/search"
    answer = json.loads(_get(Request(url, body, {"Content-Type": "application/json"})))
    return [(experiment["name"], experiment["experiment_id"]) for experiment in answer.get("experiments", [])]


def _get(request: str | Request) -> Any:
    """The body of the answer to a request past any proxy, which could not reach this machine's own address."""
    with build_opener(ProxyHandler({})).open(request, timeout=10) as answer:
        return answer.read()
