"""Where MLflow keeps a study's runs: in the run directory, a SQLite database (`mlflow.db`) and a folder of files
(`artifacts/`), or elsewhere (`tracking=`), mostly a tracking server, but also a database, Databricks or a folder.

A place may be away, slow, damaged, or refuse. None of that holds a study up: a request waits for seconds.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.store.database import engine_options, masked, sqlite_file, trouble
from trials.store.user_cache import disk_full, is_disk_full, user_cache

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from search.config import StudyConfig

LOCAL, VARIABLE, ALLOW_FOLDERS = "local", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"
"""Value of `tracking` that keeps runs in the run directory, whatever the environment has; MLflow's own variables
that name a tracking server, and without which it refuses to keep runs in a folder of files."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Variables by which MLflow reports nothing to anyone and prints no bars; set before it is imported."""
BOUNDS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 1,
    "MLFLOW_HTTP_REQUEST_TIMEOUT": 10,
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": 5,
}
"""Largest number of retries and of seconds of a request. MLflow's own are 7, 120 and 500: many minutes."""
LOCK_SECONDS = 10.0
"""How long another process may hold `mlflow.db` before that is an error."""
STUDY_ID = "mlflow.dhen.study"
"""Tag of a study's experiment that identifies the study."""
DATABASES, DATABRICKS = ("sqlite", "postgresql", "mysql", "mssql"), "databricks"
"""Kinds of places, by the scheme of their address; `databricks` may also be the whole address."""
ADDRESSES = (
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("runs", "artifact_uri"),
    ("experiments", "artifact_location"),
)
"""MLflow's tables and columns that hold absolute addresses of files; versions of models are found by the addresses
of logged models, and so come before them."""
NO_ANSWER = ("failed with exception", "failed with timeout exception")
"""What MLflow's message holds if there was no answer, or errors of the server alone."""
NO_DATABRICKS = (
    "MLflow cannot use the Databricks workspace. DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile of "
    "~/.databrickscfg (databricks://PROFILE), say which it is and who asks; names of experiments are paths there "
    "(name=/Users/you@example.com/ads)."
)
LIBRARIES = ("mlflow", "alembic", "requests", "urllib3", "databricks")
"""Libraries whose errors are MLflow's."""
REFUSED = {
    None: "the MLflow tracking server does not answer.",
    401: "the MLflow tracking server does not know who asks (401): set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
    403: "the MLflow tracking server refuses (403): it must allow you to write there, and allow the name by which "
    "it is called (mlflow server --allowed-hosts).",
    404: "nothing of an MLflow tracking server is found there (404): is the address right?",
}
LOG = logging.getLogger(__name__)


def database(directory: Path) -> Path:
    """Returns where the database of a run directory's MLflow lies."""
    return directory / "mlflow.db"


def artifacts(directory: Path) -> Path:
    """Returns where the files of a study's runs lie."""
    return directory / "artifacts"


def local_path(uri: str) -> Path:
    """Returns the path of a file:// address."""
    return Path(url2pathname(urlsplit(uri).path))


def store_uri(directory: Path) -> str:
    """Returns the address of a run directory's own store."""
    return f"sqlite:///{database(directory).absolute()}"


def server_of(config: StudyConfig) -> str | None:
    """Returns the address of a study's tracking server or database; None if runs stay in its directory."""
    return None if config.tracking == LOCAL else config.tracking


def with_destination(config: StudyConfig, directory: Path) -> StudyConfig:
    """Returns settings with the place of the runs: the one that they name, else the environment's.

    Raises:
        UserError: as `check_server`.
    """
    source, given = ("tracking", config.tracking) if config.tracking else (VARIABLE, os.environ.get(VARIABLE))
    if not given or given == LOCAL:
        return config
    server = check_server(given, source)
    return config.replace(tracking=None if server == store_uri(directory) else server)


def check_server(uri: str, source: str) -> str:
    """Returns an address as study.yaml may have it: without passwords, with absolute paths, without a last slash.

    Raises:
        UserError: if MLflow keeps no runs at such an address, or it holds a password and was given elsewhere
            (`source`) than in the environment.
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
    expected = (
        "expected an address at which MLflow keeps runs: http://tracking.example:5000, sqlite:///FILE, "
        "postgresql://USER@HOST/DATABASE, mysql:// or mssql:// likewise, or databricks (uc, Unity Catalog, has "
        "models and no runs)"
    )
    if kind in ("", "file"):
        folder = (local_path(shown) if kind else Path(shown)).absolute()
        if os.environ.get(ALLOW_FOLDERS, "").lower() in ("true", "1"):
            return folder.as_uri()
        expected = (
            f"MLflow no longer keeps runs in folders. Pass sqlite:///{folder}/mlflow.db, or set "
            f"{ALLOW_FOLDERS}=true, which allows the folder; the address of a server begins with http://"
        )
    raise UserError(f"{source}={shown}: {expected}. With tracking=local they stay in the run directory.")


def without_secrets(uri: str) -> str:
    """Returns an address without passwords and tokens; that of a web server also without the user."""
    address, _, query = masked(uri).partition("?")
    words = [word for word in query.split("&") if not word.endswith("=***")]
    address = address.replace("://***@", "://").replace(":***@", "@")
    return "?".join(filter(None, (address, "&".join(words))))


def is_database(uri: str) -> bool:
    """Tells whether MLflow keeps runs in a database there; their files then need another place."""
    return _kind(uri) in DATABASES


def open_client(uri: str) -> MlflowClient:
    """Returns a client of a place that answers within `BOUNDS`; a SQLite file that is not there is made, schema
    and all. What it raises is for `mlflow_errors`."""
    for name, bound in BOUNDS.items():
        given = os.environ.get(name, "")
        os.environ[name] = str(min(int(given), bound) if given.isdecimal() else bound)
    address = _with_secrets(uri)
    if is_database(uri):  # reached once, because MLflow itself would try for minutes
        file = sqlite_file(address)
        if file is not None:
            _make_store(file)
        engine = sa.create_engine(address, **engine_options(address))
        try:
            sa.inspect(engine).get_table_names()
        finally:
            engine.dispose()
    return _client(address)


def _client(address: str) -> MlflowClient:
    """Returns a client of MLflow that keeps to itself: errors are exceptions alone, and what it uses of other
    libraries that is deprecated is not the user's concern."""
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import mlflow

        for library, level in (("mlflow", "CRITICAL"), ("alembic", "WARNING"), ("databricks", "CRITICAL")):
            logging.getLogger(library).setLevel(level)
        client = mlflow.MlflowClient(tracking_uri=address, registry_uri=address)
        client.search_experiments(max_results=1)
        return client


def _with_secrets(uri: str) -> str:
    """Returns an address with the secrets that the environment has for it."""
    named = os.environ.get(VARIABLE, "").rstrip("/")
    return named if without_secrets(named) == uri else uri


def _kind(uri: str) -> str:
    """Returns the scheme of an address without a driver; the empty text for a path."""
    if ":" not in uri:
        return uri if uri in (DATABRICKS, "databricks-uc", "uc") else ""
    return uri.partition(":")[0].partition("+")[0]


def check_store(directory: Path) -> None:
    """Fails at once if MLflow itself would try again for minutes. If the directory was moved or copied, the
    addresses of its files, which MLflow keeps as absolute ones, become those that they have now.

    Raises:
        UserError: if there is a store and it is no database, or locked, or cannot be written.
    """
    path, here = database(directory), artifacts(directory).absolute()
    if not path.exists():
        return
    query = (
        "select experiment_id, artifact_location from experiments join experiment_tags using (experiment_id) "
        "where key = ?"
    )
    with (
        mlflow_errors(store_uri(directory), own=True),
        closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection,
    ):
        connection.execute("BEGIN IMMEDIATE")
        tables = {name for (name,) in connection.execute("select name from sqlite_master")}
        if {table for table, _ in ADDRESSES} <= tables:  # else MLflow makes or migrates it
            for experiment, there in connection.execute(query, (STUDY_ID,)).fetchall():
                if local_path(there).resolve() != here.resolve():
                    _change_addresses(connection.execute, experiment, there, here.as_uri())
        connection.execute("COMMIT")


def take_addresses_along(uri: str, experiment: str, there: str, here: str) -> None:
    """Changes where a database looks for the files of a study, whose run directory was moved."""
    engine = sa.create_engine(_with_secrets(uri), **engine_options(_with_secrets(uri)))
    with engine.begin() as connection:
        _change_addresses(
            lambda query, values: connection.execute(sa.text(query), values), int(experiment), there, here
        )
    engine.dispose()


def _change_addresses(
    execute: Callable[[str, dict[str, Any]], object], experiment: int, there: str, here: str
) -> None:
    """Changes the addresses of an experiment's files, in SQL that all of MLflow's databases take."""
    below = re.sub("([!%_[])", r"!\1", there) + "/%"
    for table, column in ADDRESSES:
        its = "experiment_id = :experiment"
        if table == "model_versions":
            its = f"{column} in (select artifact_location from logged_models where {its})"
        execute(
            f"update {table} set {column} = replace({column}, :there, :here) "
            f"where {its} and ({column} = :there or {column} like :below escape '!')",
            {"experiment": experiment, "there": there, "here": here, "below": below},
        )


def _make_store(path: Path) -> None:
    """Makes a database that is whole or not there: MLflow could not go on with one whose making was cut short.

    MLflow makes the first one by all migrations that there ever were, in some seconds; an empty one is kept in the
    user's cache, and later ones are copies of it.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name of its own each time: MLflow holds on to a store whose making found no space
    making = path.with_name(f".{path.name}.{time.monotonic_ns()}.making")
    for leftover in path.parent.glob(f".{path.name}.*"):  # journals, too
        leftover.unlink()
    empty = user_cache() / "mlflow" / f"empty-{version('mlflow')}.db"
    is_whole = False
    if empty.exists():
        with suppress(sqlite3.Error), closing(sqlite3.connect(empty)) as connection:
            is_whole = connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    if is_whole:
        _copy(empty, path)
        return
    _client(f"sqlite:///{making.absolute()}")
    with suppress(OSError, sqlite3.Error):  # a cache that cannot be written saves nothing
        empty.parent.mkdir(parents=True, exist_ok=True)
        _copy(making, empty)
    _copy(making, path)
    making.unlink()


def _copy(store: Path, path: Path) -> None:
    """Copies a database that somebody may hold open, whole or not at all."""
    with (
        atomic_file(path) as partial,
        closing(sqlite3.connect(store)) as source,
        closing(sqlite3.connect(partial)) as target,
    ):
        source.backup(target)


@contextmanager
def mlflow_errors(uri: str, *, own: bool = False) -> Iterator[None]:
    """Turns what goes wrong with MLflow into one sentence; the same trouble gives the same sentence.

    Args:
        uri: address of the place.
        own: whether it is the run directory's own store.

    Raises:
        UserError: for whatever MLflow, its database, its server or the disk raise.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind, file = _kind(uri), sqlite_file(uri)
        remedy = " Or move it away: it is made anew from the study. No trial is lost." if own else ""
        for cause in (error, error.__cause__):
            if isinstance(cause, SQLAlchemyError | sqlite3.Error | ModuleNotFoundError):
                raise UserError(trouble(uri, cause) + remedy) from error
        if file is not None and is_disk_full(error):
            raise disk_full(file) from error
        foreign = type(error).__module__.split(".")[0] in LIBRARIES
        if not foreign and not isinstance(error, OSError):
            raise
        if not foreign and not isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            raise UserError(
                f"{uri}: what it is to be sent cannot be written or read here: {error}"
            ) from error
        if kind in ("file", *DATABASES):
            raise UserError(f"{uri}: MLflow cannot use it: {str(error).splitlines()[0]}.{remedy}") from error
        # the message of a server or a proxy may repeat credentials
        status = None
        if not any(words in str(error) for words in NO_ANSWER):
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status is None and hasattr(error, "get_http_status_code"):
                status = error.get_http_status_code()
        LOG.info("MLflow at %s: %s, status %s", uri, type(error).__name__, status)
        answered = f"the MLflow tracking server answers with an error ({status}); its own log says why."
        raise UserError(
            f"{uri}: {NO_DATABRICKS if kind == DATABRICKS else REFUSED.get(status, answered)}"
        ) from error
