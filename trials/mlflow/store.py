"""MLflow's store of one study: a SQLite database and a folder of files, both in the run directory."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.storage.disk_full import free_space, is_disk_full
from trials.user_cache import user_cache

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Variables by which MLflow reports nothing to anyone and prints no bars; they must be set before MLflow is
imported."""
LOCK_SECONDS = 10.0
"""How long another process may hold the store before that is an error."""
STUDY_ID = "mlflow.dhen.study"
"""Tag of a study's experiment that says which study it is."""
ADDRESSES = (
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("runs", "artifact_uri"),
    ("experiments", "artifact_location"),
)
"""Tables of MLflow's and their columns in which files have absolute addresses; versions of models have those of
logged models, and so come before them."""


def database(directory: Path) -> Path:
    """Returns where the store of a study lies."""
    return directory / "mlflow.db"


def artifacts(directory: Path) -> Path:
    """Returns where the files of a study's runs lie."""
    return directory / "artifacts"


def local_path(uri: str) -> Path:
    """Returns the path of a file:// address."""
    return Path(url2pathname(urlsplit(uri).path))


def store_uri(directory: Path) -> str:
    """Returns the store's name as MLflow wants it."""
    return f"sqlite:///{database(directory).absolute()}"


def check_store(directory: Path) -> None:
    """Fails at once where MLflow itself would try again for minutes. In a directory that was moved or copied the
    addresses of its files, which MLflow keeps as absolute ones, become those that they have now.

    Raises:
        UserError: when there is a store and it is no database, or locked, or cannot be written.
    """
    path = database(directory)
    if not path.exists():
        return
    with (
        store_errors(directory),
        closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection,
    ):
        connection.execute("PRAGMA schema_version").fetchone()
        connection.execute("BEGIN IMMEDIATE")
        _take_addresses_along(connection, artifacts(directory))
        connection.execute("COMMIT")


def _take_addresses_along(connection: sqlite3.Connection, here: Path) -> None:
    tables = {name for (name,) in connection.execute("select name from sqlite_master")}
    if not {table for table, _ in ADDRESSES} <= tables:
        return  # MLflow makes or migrates it
    query = (
        "select experiment_id, artifact_location from experiments join experiment_tags using (experiment_id) "
        "where key = ?"
    )
    for experiment, there in connection.execute(query, (STUDY_ID,)).fetchall():
        if local_path(there).resolve() != here.resolve():
            change_addresses(connection.execute, experiment, there, here.absolute().as_uri())


def change_addresses(
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


def open_store(directory: Path) -> MlflowClient:
    """Returns a client of the study's store, which is made, schema and all, where there is none.

    Raises:
        UserError: when the store is damaged, locked or cannot be written.
    """
    check_store(directory)
    with store_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        make_store(database(directory))
        return open_client(store_uri(directory))


def open_client(uri: str) -> MlflowClient:
    """Returns a client that has reached its store.

    MLflow is told to keep to itself: errors reach the caller as exceptions, not as log lines too, and what
    it uses of other libraries that is deprecated is not the user's concern.
    """
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("databricks").setLevel(logging.CRITICAL)
        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
        return client


@contextmanager
def store_errors(directory: Path) -> Iterator[None]:
    """Turns what goes wrong with the store into an error that says what to do."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, OSError) as error:
        raise _store_error(directory, error) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("mlflow", "alembic"):
            raise
        raise _store_error(directory, error) from error


def make_store(path: Path) -> None:
    """Makes a store that is whole or not there: MLflow could not go on with one whose making was cut short.

    MLflow makes the first one by all migrations that there ever were, in some seconds; an empty one is kept in the
    user's cache, and later ones are copies of it.
    """
    if path.exists():
        return
    # a name of its own each time: MLflow holds on to a store whose making found no space
    making = path.with_name(f".{path.name}.{time.monotonic_ns()}.making")
    for leftover in path.parent.glob(f".{path.name}.*"):  # journals, too
        leftover.unlink()
    kept = _kept_empty()
    if _is_whole(kept):
        _copy(kept, path)
        return
    open_client(f"sqlite:///{making.absolute()}")
    with contextlib.suppress(OSError, sqlite3.Error):  # a cache that cannot be written saves nothing
        kept.parent.mkdir(parents=True, exist_ok=True)
        _copy(making, kept)
    _copy(making, path)
    making.unlink()


def _kept_empty() -> Path:
    """Returns where an empty store of this version of MLflow is kept."""
    return user_cache() / "mlflow" / f"empty-{version('mlflow')}.db"


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        with closing(sqlite3.connect(path)) as connection:
            return bool(connection.execute("PRAGMA quick_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def _copy(store: Path, path: Path) -> None:
    """Copies a store that somebody may hold open, whole or not at all."""
    with (
        atomic_file(path) as partial,
        closing(sqlite3.connect(store)) as source,
        closing(sqlite3.connect(partial)) as target,
    ):
        source.backup(target)


def _store_error(directory: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    store = database(directory)
    if "locked" in reason:
        remedy = "Another process holds it: end that one, then run the same command again."
    elif "full" in reason or "disk I/O error" in reason or is_disk_full(error):
        remedy = f"{free_space(store)} Free some space there, then run the same command again."
    else:
        remedy = "Move it away or delete it, then run the same command again: it is made anew from the study."
    return UserError(f"{store}: MLflow's store cannot be used ({reason}). {remedy} No trial is lost by that.")
