"""MLflow's own servers as processes: a tracking server, and one that serves a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

START_SECONDS = 120.0
MLFLOW = (sys.executable, "-m", "mlflow")
GUARDED = ("sh", "-c", '"$0" "$@" & read _; kill -9 0')
"""Runs a command until its input is closed, which this process's death does too, and ends the process group."""


@contextmanager
def tracking_server(folder: Path, port: int) -> Iterator[str]:
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
    files = ["--artifacts-destination", str(folder / "files")]
    command = [
        *MLFLOW,
        "server",
        "--workers",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *store,
        *files,
    ]
    with _server(command, f"http://127.0.0.1:{port}/health", {}) as address:
        yield address.removesuffix("/health")


@contextmanager
def model_server(model: str, store: str, port: int) -> Iterator[str]:
    command = [*MLFLOW, "models", "serve", "--env-manager", "local", "-m", model, "--port", str(port)]
    with _server(command, f"http://127.0.0.1:{port}/ping", {"MLFLOW_TRACKING_URI": store}) as address:
        yield address.replace("/ping", "/invocations")


def post(address: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


@contextmanager
def _server(command: list[str], health: str, variables: Mapping[str, str]) -> Iterator[str]:
    """A process that ends with all its children; in an environment whose commands are those of this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    quiet["PYTHONDONTWRITEBYTECODE"] = "1"  # beside the code of a model that is served from its store
    process = subprocess.Popen(
        [*GUARDED, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **quiet, **variables},
        start_new_session=True,
    )
    try:
        _wait_for(health, process)
        yield health
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            build_opener(ProxyHandler({})).open(address, timeout=10).close()
        except (OSError, HTTPException):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{address} never answered")
