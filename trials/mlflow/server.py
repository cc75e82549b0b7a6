"""A tracking server of MLflow's, elsewhere, to which a study's runs go in place of the run directory's store.

It may be away, slow, or refuse. None of that holds a study up: a request waits for seconds, a whole writing for a
minute, and what was not written then is written later, because MLflow never holds what the ledger does not.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dhen.errors import UserError
from trials.mlflow.store import open_client

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCAL = "local"
"""Value of `tracking` by which runs stay in the run directory, whatever the environment says."""
VARIABLE = "MLFLOW_TRACKING_URI"
"""The environment's variable that names the tracking server, as MLflow itself has it."""
BOUNDS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": 1, "MLFLOW_HTTP_REQUEST_TIMEOUT": 10}
"""Largest number of retries and of seconds of a request. MLflow's own are 7 and 120, many minutes altogether."""
NO_ANSWER = (ConnectionError, TimeoutError, socket.gaierror)
"""Errors of this machine's own that say that the server does not answer."""
UNREACHABLE = ("failed with exception", "failed with timeout exception")
"""What MLflow's message holds where there was no answer, or errors of the server alone."""
UNAUTHENTICATED, FORBIDDEN, NOT_FOUND = 401, 403, 404

LOG = logging.getLogger(__name__)


def check_server(uri: str, source: str) -> str:
    """Returns the address of a tracking server without a slash at its end.

    Raises:
        UserError: where it is no address of a server, or holds a password; `source` says where it was given.
    """
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise UserError(
            f"{source}: the address holds a name or a password, which would be written to study.yaml. Leave them "
            "out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{source}={uri}: expected the address of an MLflow tracking server, such as "
            "http://tracking.example:5000. A study with tracking=local keeps its runs in mlflow.db."
        )
    return uri.rstrip("/")


def open_server(uri: str) -> MlflowClient:
    """Returns a client of a server that answers; its requests end within `BOUNDS`.

    Raises:
        UserError: where the server does not answer, or refuses.
    """
    for name, bound in BOUNDS.items():
        given = os.environ.get(name, "")
        os.environ[name] = str(min(int(given), bound) if given.isdecimal() else bound)
    with server_errors(uri):
        return open_client(uri)


@contextmanager
def server_errors(uri: str) -> Iterator[None]:
    """Turns what goes wrong with the server into one sentence; the same trouble gives the same sentence."""
    try:
        yield
    except Exception as error:
        root = type(error).__module__.split(".")[0]
        if root not in ("mlflow", "requests", "urllib3") and not isinstance(error, OSError):
            raise
        if root not in ("mlflow", "requests", "urllib3") and not isinstance(error, NO_ANSWER):
            raise UserError(
                f"{uri}: what it is to be sent cannot be written or read here: {error}"
            ) from error
        status = _status(error)
        # the message itself may repeat what a proxy or the server said of credentials
        LOG.info("MLflow at %s: %s, status %s", uri, type(error).__name__, status)
        raise UserError(f"{uri}: {_trouble(status)}") from error


def _status(error: Exception) -> int | None:
    """Returns the status with which the server answered; None where it did not answer."""
    if any(words in str(error) for words in UNREACHABLE):
        return None
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    of_mlflow = getattr(error, "get_http_status_code", None)
    return status if status is not None else of_mlflow() if of_mlflow else None


def _trouble(status: int | None) -> str:
    if status is None:
        return "the MLflow tracking server does not answer."
    if status == UNAUTHENTICATED:
        return (
            "the MLflow tracking server does not know who asks (401): set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        )
    if status == FORBIDDEN:
        return (
            "the MLflow tracking server refuses (403): it must allow you to write there, and allow the name by "
            "which it is called (mlflow server --allowed-hosts)."
        )
    if status == NOT_FOUND:
        return "nothing of an MLflow tracking server is found there (404): is the address right?"
    return f"the MLflow tracking server answers with an error ({status}); its own log says why."
