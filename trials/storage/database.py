"""A database that several drivers write to: its engine, its tables made once, its troubles in words.

SQLite waits for a lock for a minute; PostgreSQL is for drivers on several machines.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

# whole before there are threads: queries ask what another one has imported of it, as MLflow's store does
import sqlalchemy.orm
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from dhen.errors import UserError
from trials.storage.disk_full import DiskFullError, free_space
from trials.storage.versions import bring_up_to_date, check_version

LOG = logging.getLogger(__name__)
SQLITE_TIMEOUT_SECONDS = 60
PAGE_BYTES = 4096
"""The least that SQLite writes."""
FOREIGN = ("no such table", "no such column", "has no column", "does not exist", "already exists")
"""Pattern of what databases say of tables that are not the ones expected."""
DIALECTS = ("sqlite", "postgresql")
"""Kinds of databases whose `insert` can leave or change the row that is there."""
_SECRET_NAME = (
    r"[\w.-]*(?:token|pass(?!file)|pwd|secret|signature|credential|(?:api|access|account|private)[_-]?key)[\w.-]*"
    r"|key|sig|auth|odbc_connect"
)
SECRETS = (
    (re.compile(r"(https?://)[^/?#\s]*@"), r"\1***@"),
    # up to the last @ before the path; else a password with a slash in it, which SQLAlchemy takes
    (re.compile(r"(://[^:/?#@\s]*):(?:[^/?#\s]*|[^@\s]*)@"), r"\1:***@"),
    (re.compile(rf"([?&#;](?:{_SECRET_NAME})=)[^&#\s'\"]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"^((?!.*://).*:)[^:/@\s]*@"), r"\1***@"),  # no URL, though somebody meant one
)
"""Patterns of secrets in URLs, and what is shown in their place."""

CONNECT_SECONDS = 10
"""Seconds for which a server may be silent while a connection is made."""
SILENT_SERVER = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30000,
}
"""How soon (seconds; the last in milliseconds) a connection to a machine that is gone counts as broken."""


class ServerGoneError(UserError):
    """A database server does not answer, or broke off; the transaction may be tried again."""


class Database:
    """Transactions on tables, by URL."""

    def __init__(self, url: str, tables: sa.MetaData, *, create: bool) -> None:
        """Makes the tables where they are missing, and migrates older ones, unless told not to.

        Raises:
            UserError: when the database is of another kind, locked, damaged, full or out of reach, or of
                another version.
        """
        self.url = url
        self.patience_seconds = 0.0
        """Seconds for which methods that are `patient` (`trials.storage.patience`) wait for a server."""
        self.say: Callable[[str], None] = LOG.warning
        """Is told that the server is waited for, and that it answers again."""
        self._statements: dict[tuple[str, tuple[str, ...]], Any] = {}
        with self._errors_in_words():
            self._engine = sa.create_engine(url, **engine_options(url))
            if self._engine.dialect.name not in DIALECTS:
                raise UserError(
                    f"{masked(url)}: a database of the kind {self._engine.dialect.name!r}; "
                    f"use SQLite (sqlite:////path/study.db) or PostgreSQL (postgresql://user@host/studies)."
                )
            if self._engine.dialect.name == "sqlite":
                sa.event.listen(self._engine, "connect", _with_foreign_keys)
            try:
                with self._engine.begin() as connection:
                    if create:
                        bring_up_to_date(connection, tables, masked(url))
                    else:
                        check_version(connection, tables, masked(url))
            except BaseException:
                self._engine.dispose()
                raise

    @property
    def takes_several_drivers(self) -> bool:
        """Whether several drivers may write at the same time; a file takes one after another."""
        return self._engine.dialect.name != "sqlite"

    def close(self) -> None:
        """Releases the database."""
        self._engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Opens a transaction that is committed at the end and undone by an error.

        Raises:
            UserError: when the database fails, in words.
        """
        with self._errors_in_words(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Opens a transaction in which records are read, which may be damaged or of another version.

        Raises:
            UserError: as `transaction`, and if a record cannot be read, in words.
        """
        with self.transaction() as connection, self.record_errors():
            yield connection

    @contextlib.contextmanager
    def record_errors(self) -> Iterator[None]:
        """Turns what goes wrong with a record that was read into an error that says what to do."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"the database {masked(self.url)} holds a record that cannot be read ({reason}): the file is "
                "damaged, or another version of dhen-search wrote it. Restore it from a copy, look at it with "
                "that version, or choose another --out for a new study."
            ) from error

    def insert_new(self, connection: sa.Connection, table: sa.Table, **values: Any) -> None:
        """Inserts a row, unless there is one with its key, whoever has written it."""
        connection.execute(self._insert(table, ()), values)

    def upsert(self, connection: sa.Connection, table: sa.Table, **values: Any) -> None:
        """Inserts a row; an existing row with its key takes these values."""
        key = table.primary_key.columns
        connection.execute(self._insert(table, tuple(name for name in values if name not in key)), values)

    def _insert(self, table: sa.Table, changed: tuple[str, ...]) -> Any:
        """Returns the statement, made once: making it anew for each row takes longer than writing the row."""
        statement = table.name, changed
        if statement not in self._statements:
            insert = importlib.import_module(f"sqlalchemy.dialects.{self._engine.dialect.name}").insert(table)
            new = {name: insert.excluded[name] for name in changed}
            key = table.primary_key.columns.keys()
            self._statements[statement] = (
                insert.on_conflict_do_update(index_elements=key, set_=new)
                if changed
                else insert.on_conflict_do_nothing()
            )
        return self._statements[statement]

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, ModuleNotFoundError) as error:
            kind = DiskFullError if _is_full(self.url, _reason(error)) else UserError
            if kind is UserError and self._is_gone(error):
                kind = ServerGoneError
            raise kind(trouble(self.url, error)) from None

    def _is_gone(self, error: Exception) -> bool:
        """Tells whether a server, which has answered before, does not any more."""
        broken = isinstance(error, OperationalError | InterfaceError) or (
            isinstance(error, DBAPIError) and error.connection_invalidated
        )
        return broken and self.takes_several_drivers


def sqlite_url(path: Path) -> str:
    """Returns the URL of a SQLite file."""
    return f"sqlite:///{path.resolve()}"


def same_database(first_url: str, second_url: str) -> bool:
    """Tells whether two URLs are of one database."""
    return first_url == second_url or _normal(first_url) == _normal(second_url)


def trouble(url: str, error: Exception) -> str:
    """Says what is wrong with a database, and what would work."""
    reason = _reason(error)
    if "locked" in reason:
        remedy = "another process holds it: wait for that to end, or stop it"
    elif _is_full(url, reason):
        remedy = f"free some disk space and run the same command again: finished trials are safe{_free(url)}"
    elif any(words in reason for words in FOREIGN):
        remedy = "its tables are those of another version or another program: name another database"
    elif "readonly" in reason and (path := sqlite_file(url)) is not None and not path.exists():
        remedy = "it was moved or deleted meanwhile: put it back, or run the command again"
    elif "readonly" in reason:
        remedy = "it cannot be written: check the permissions of the file and its folder"
    elif isinstance(error, DatabaseError) and not isinstance(error, OperationalError):
        remedy = "the file is damaged: restore it from a copy, or name another one"
    elif isinstance(error, ModuleNotFoundError):
        remedy = "install the driver it names, for PostgreSQL with `pip install 'psycopg[binary]'`"
    elif isinstance(error, ArgumentError):
        remedy = "give a SQLAlchemy URL, e.g. sqlite:////path/study.db or postgresql://user@host/studies"
    else:
        remedy = "check the address, the permissions of the file and its folder, and that the server runs"
    return f"the database {masked(url)} cannot be used ({reason}); {remedy}."


def _reason(error: Exception) -> str:
    reason = str(getattr(error, "orig", None) or error).splitlines()[0]
    return re.sub(r"[^\s'\"]+@", "***@", reason)  # of a password with an @, a part is taken for the host


def _is_full(url: str, reason: str) -> bool:
    """Tells whether a database lacks space, which SQLite calls by many names (`unable to open`)."""
    if "is full" in reason or "No space left" in reason:
        return True
    path = sqlite_file(url)
    if path is None or not path.parent.exists() or "locked" in reason:
        return False
    return "disk I/O error" in reason or shutil.disk_usage(path.parent).free < PAGE_BYTES


def _free(url: str) -> str:
    path = sqlite_file(url)
    return f". {free_space(path).removesuffix('.')}" if path is not None else ""


def sqlite_file(url: str) -> Path | None:
    """Returns the file of a SQLite database."""
    try:
        parsed = parsed_url(url)
    except ArgumentError:
        return None
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def parsed_url(url: str) -> sa.URL:
    """Returns the parts of a database's URL.

    Raises:
        ArgumentError: for text that is no such URL.
    """
    try:
        return sa.engine.make_url(url)
    except ValueError:
        raise ArgumentError("its port is no number") from None


def masked(text: str) -> str:
    """Returns a URL, or text with URLs, as it may be shown: `***` in place of passwords and tokens, and of whoever
    asks a web server, since a token may be a user name there."""
    for pattern, shown in SECRETS:
        text = pattern.sub(shown, text)
    return text


def engine_options(url: str) -> dict[str, Any]:
    """Returns what SQLAlchemy needs to know: SQLite waits for a lock, other databases check their connections."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": SQLITE_TIMEOUT_SECONDS}}
    parsed = parsed_url(url)
    if parsed.get_backend_name() != "postgresql" or parsed.get_driver_name() != "psycopg":
        return {"pool_pre_ping": True}
    wanted = {"connect_timeout": CONNECT_SECONDS} | SILENT_SERVER
    return {
        "pool_pre_ping": True,
        "connect_args": {name: value for name, value in wanted.items() if name not in parsed.query},
    }


def _with_foreign_keys(connection: Any, _: object) -> None:
    connection.execute("PRAGMA foreign_keys = ON")


def _normal(url: str) -> str:
    """Returns the URL, with a SQLite file by its real path, and a server without who asks it and how."""
    try:
        parsed = parsed_url(url)
    except ArgumentError:
        return url
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        return sqlite_url(Path(parsed.database))
    return repr(
        (parsed.get_backend_name(), parsed.host, parsed.port, parsed.database, sorted(parsed.query.items()))
    )
