"""Where else than in the run directory MLflow keeps a study's runs: mostly a tracking server, but also a database,
Databricks, or a folder. All are called servers here.

A server may be away, slow, or refuse. None of that holds a study up: a request waits for seconds, a whole writing
for a minute, and what was not written then is written later, because MLflow never holds what the ledger does not.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from dhen.errors import UserError
from trials.mlflow.store import change_addresses, local_path, make_store, open_client
from trials.storage.database import engine_options, masked, sqlite_file, trouble

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCAL = "local"
"""Value of `tracking` by which runs stay in the run directory, whatever the environment says."""
VARIABLE = "MLFLOW_TRACKING_URI"
"""The environment's variable that names the tracking server, as MLflow itself has it."""
ALLOW_FOLDERS = "MLFLOW_ALLOW_FILE_STORE"
"""MLflow's variable without which it refuses to keep runs in a folder of files."""
DATABASES, DATABRICKS = ("sqlite", "postgresql", "mysql", "mssql"), "databricks"
"""Kinds of servers, by the scheme of their address; `databricks` may also be the whole address."""
BOUNDS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 1,
    "MLFLOW_HTTP_REQUEST_TIMEOUT": 10,
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": 5,
}
"""Largest number of retries and of seconds of a request. MLflow's own are 7, 120 and 500: many minutes."""
NO_ANSWER = (ConnectionError, TimeoutError, socket.gaierror)
"""Errors of this machine's own that say that the server does not answer."""
UNREACHABLE = ("failed with exception", "failed with timeout exception")
"""What MLflow's message holds where there was no answer, or errors of the server alone."""
NO_DATABRICKS = (
    "MLflow cannot use the Databricks workspace. DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile of "
    "~/.databrickscfg (databricks://PROFILE), say which it is and who asks; names of experiments are paths there "
    "(name=/Users/you@example.com/ads)."
)
UNAUTHENTICATED, FORBIDDEN, NOT_FOUND = 401, 403, 404

LOG = logging.getLogger(__name__)


def check_server(uri: str, source: str) -> str:
    """Returns the address of a place where MLflow keeps runs as study.yaml may have it: without passwords, with
    absolute paths, without a slash at its end.

    Raises:
        UserError: if MLflow keeps no runs at such an address, or it holds a password and comes from elsewhere than
            the environment; `source` is where it was given.
    """
    shown, kind = without_secrets(uri), _kind(uri)
    if shown != uri and source != VARIABLE:
        raise UserError(
            f"{source}: the address holds a name, a password or a token, which study.yaml would hold too. Give "
            f"this address in {VARIABLE}, whose secrets are not kept, or leave them out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, or PGPASSWORD."
        )
    if re.match(r"https?://[^/:?#]", shown):
        return shown.rstrip("/")
    with suppress(SQLAlchemyError, ValueError):  # ValueError: a port that is no number
        if kind in DATABASES:
            url = sa.make_url(shown)
            if kind != "sqlite":
                return shown
            if url.database:
                return str(url.set(database=str(Path(url.database).absolute())))
    if kind == DATABRICKS or kind in entry_points(group="mlflow.tracking_store").names:
        return shown
    if kind in ("", "file"):
        folder = (local_path(shown) if kind else Path(shown)).absolute()
        if os.environ.get(ALLOW_FOLDERS, "").lower() in ("true", "1"):
            return folder.as_uri()
        raise UserError(
            f"{source}={shown}: MLflow no longer keeps runs in folders. Pass sqlite:///{folder}/mlflow.db, or set "
            f"{ALLOW_FOLDERS}=true, which allows the folder; the address of a server begins with http://. A study "
            "with tracking=local keeps its runs in the run directory."
        )
    raise UserError(
        f"{source}={shown}: expected an address at which MLflow keeps runs: http://tracking.example:5000, "
        "sqlite:///FILE, postgresql://USER@HOST/DATABASE, mysql:// or mssql:// likewise, or databricks (uc, Unity "
        "Catalog, has models and no runs). A study with tracking=local keeps its runs in the run directory."
    )


def is_database(uri: str) -> bool:
    """Tells whether MLflow keeps runs in a database of its own there; their files then need another place."""
    return _kind(uri) in DATABASES


def without_secrets(uri: str) -> str:
    """Returns an address without passwords and tokens; that of a web server also without the user."""
    address, _, query = masked(uri).partition("?")
    words = [word for word in query.split("&") if not word.endswith("=***")]
    address = address.replace("://***@", "://").replace(":***@", "@")
    return "?".join(filter(None, (address, "&".join(words))))


def open_server(uri: str) -> MlflowClient:
    """Returns a client of a server that answers; its requests end within `BOUNDS`.

    Raises:
        UserError: where the server does not answer, or refuses.
    """
    for name, bound in BOUNDS.items():
        given = os.environ.get(name, "")
        os.environ[name] = str(min(int(given), bound) if given.isdecimal() else bound)
    with server_errors(uri):
        if is_database(uri):
            _reach_database(_address(uri))
        return open_client(_address(uri))


def take_addresses_along(uri: str, experiment: str, there: str, here: str) -> None:
    """Changes where a database looks for the files of a study, whose run directory was moved."""
    engine = sa.create_engine(_address(uri), **engine_options(_address(uri)))
    with engine.begin() as connection:
        change_addresses(
            lambda query, values: connection.execute(sa.text(query), values), int(experiment), there, here
        )
    engine.dispose()


def _address(uri: str) -> str:
    """Returns an address with the secrets that the environment has for it."""
    named = os.environ.get(VARIABLE, "").rstrip("/")
    return named if without_secrets(named) == uri else uri


def _kind(uri: str) -> str:
    """Returns the scheme of an address without a driver; the empty text for a path."""
    if ":" not in uri:
        return uri if uri in (DATABRICKS, "databricks-uc", "uc") else ""
    return uri.partition(":")[0].partition("+")[0]


def _reach_database(address: str) -> None:
    """Connects once, because MLflow itself would try for minutes; makes a SQLite file that is not there."""
    file = sqlite_file(address)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        make_store(file)
    engine = sa.create_engine(address, **engine_options(address))
    try:
        sa.inspect(engine).get_table_names()
    finally:
        engine.dispose()


@contextmanager
def server_errors(uri: str) -> Iterator[None]:
    """Turns what goes wrong with the server into one sentence; the same trouble gives the same sentence."""
    try:
        yield
    except Exception as error:
        for cause in (error, error.__cause__):
            if isinstance(cause, SQLAlchemyError | sqlite3.Error | ModuleNotFoundError):
                raise UserError(trouble(uri, cause)) from error
        foreign = type(error).__module__.split(".")[0] in ("mlflow", "requests", "urllib3", "databricks")
        if not foreign and not isinstance(error, OSError):
            raise
        if not foreign and not isinstance(error, NO_ANSWER):
            raise UserError(
                f"{uri}: what it is to be sent cannot be written or read here: {error}"
            ) from error
        status = _status(error)
        # the message itself may repeat what a proxy or the server said of credentials
        LOG.info("MLflow at %s: %s, status %s", uri, type(error).__name__, status)
        if _kind(uri) == DATABRICKS:
            raise UserError(f"{uri}: {NO_DATABRICKS}") from error
        if _kind(uri) == "file":
            raise UserError(f"{uri}: MLflow cannot use this folder: {str(error).splitlines()[0]}") from error
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
