"""A database that several drivers write to: its engine, its tables made once, its troubles in words.

SQLite waits for a lock for a minute; PostgreSQL is for drivers on several machines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
import sqlalchemy.orm  # whole before there are threads: queries ask what another one has imported of it
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
)

from dhen.errors import UserError
from trials.store.user_cache import DiskFullError, free_space

# Versions of the ledger's tables: a ledger of an earlier release is migrated when it is opened, by Alembic.
#
# The version stands in the database, in a table of its own name, since MLflow and Optuna, which may have the
# same database, use Alembic's default name. Alembic takes a third of a second to import, so it is asked only
# if there is something to migrate: a ledger that is up to date costs a few queries, and a new one is made as
# it is now (docs/decisions/0012-the-ledger-and-its-drivers.md).

VERSION_TABLE = "dhen_alembic_version"
REVISIONS = ("0005",)
"""All versions of the tables, the newest last; each has a file in `trials/store/migrations/versions`. Versions
below the first were never released."""
MIGRATIONS = Path(__file__).parent / "migrations"
SCHEMA_LOCK = 0x6468656E
"""The one of PostgreSQL's advisory locks that is held while tables are made or migrated ("dhen")."""
VERSION = sa.Table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""The table as Alembic makes it; it has one row."""


def check_version(connection: sa.Connection, tables: sa.MetaData, url: str) -> str | None:
    """Returns the version of a database's tables; None if it has no ledger.

    Args:
        connection: to the database.
        tables: the tables of a ledger.
        url: the database's URL as it may be shown.

    Raises:
        UserError: for a version that this program does not know, newer or from before the first release.
    """
    inspector = sa.inspect(connection)
    # first the tables: another process may make them meanwhile, and the version comes in the same transaction
    if not any(map(inspector.has_table, tables.tables)):
        return None
    versioned = inspector.has_table(VERSION_TABLE)
    version: str | None = connection.scalar(sa.select(VERSION.c.version_num)) if versioned else None
    if version is None or version < REVISIONS[0]:
        author = "a dhen-search from before the first release"
        raise UserError(
            f"the database {url} was written by {author if version else f'{author}, or by another program'}: its "
            f"tables have {f'version {version}' if version else 'no version'}, this program reads versions from "
            f"{REVISIONS[0]}. Read it with the version that wrote it, or name another database, or another --out, "
            "for a new study."
        )
    if version not in REVISIONS:
        raise UserError(
            f"the database {url} was written by a newer dhen-search: its tables have version {version}, this "
            f"program knows versions up to {REVISIONS[-1]}; upgrade dhen-search, or name another database."
        )
    return version


def bring_up_to_date(connection: sa.Connection, tables: sa.MetaData, url: str) -> None:
    """Makes the tables of a new ledger, and migrates those of an older one, all or nothing.

    Args:
        connection: to the database, in a transaction.
        tables: the tables as they are now.
        url: the database's URL as it may be shown.

    Raises:
        UserError: as `check_version`.
    """
    if check_version(connection, tables, url) == REVISIONS[-1]:
        return
    # other processes that would make tables wait until the transaction ends
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEMA_LOCK)))
    version = check_version(connection, tables, url)
    if version is None:
        tables.create_all(connection)
        VERSION.create(connection)
        connection.execute(sa.insert(VERSION).values(version_num=REVISIONS[-1]))
    elif version != REVISIONS[-1]:  # else another process was first
        migrate(connection)


def migrate(connection: sa.Connection) -> None:
    """Runs all migrations that come after the database's version, or all of them if it has none."""
    from alembic import command  # late: most ledgers are up to date
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")


# Waiting for a database server that is away: what a driver would commit, it commits once the server answers.

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
        """Makes the tables if they are missing, and migrates older ones, unless told not to.

        Raises:
            UserError: when the database is of another kind, locked, damaged, full or out of reach, or of
                another version.
        """
        self.url = url
        self.patience_seconds = 0.0
        """Seconds for which methods that are `patient` wait for a server."""
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
                foreign_keys = "PRAGMA foreign_keys = ON"
                sa.event.listen(self._engine, "connect", lambda made, _: made.execute(foreign_keys))
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
            broken = isinstance(error, OperationalError | InterfaceError) or (
                isinstance(error, DBAPIError) and error.connection_invalidated
            )
            kind = DiskFullError if _is_full(self.url, _reason(error)) else UserError
            if kind is UserError and broken and self.takes_several_drivers:
                kind = ServerGoneError  # which has answered before
            raise kind(trouble(self.url, error)) from None


def sqlite_url(path: Path) -> str:
    """Returns the URL of a SQLite file."""
    return f"sqlite:///{path.resolve()}"


def same_database(first_url: str, second_url: str) -> bool:
    """Tells whether two URLs are of one database."""
    return first_url == second_url or _normal(first_url) == _normal(second_url)


def trouble(url: str, error: Exception) -> str:
    """Says what is wrong with a database, and what would work."""
    reason, path = _reason(error), sqlite_file(url)
    if "locked" in reason:
        remedy = "another process holds it: wait for that to end, or stop it"
    elif _is_full(url, reason):
        free = f". {free_space(path).removesuffix('.')}" if path is not None else ""
        remedy = f"free some disk space and run the same command again: finished trials are safe{free}"
    elif any(words in reason for words in FOREIGN):
        remedy = "its tables are those of another version or another program: name another database"
    elif "readonly" in reason and path is not None and not path.exists():
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


PATIENCE_SECONDS = 600.0
"""Seconds for which a driver waits for the server of its ledger, before it ends; what was finished is safe."""
PAUSE_SECONDS = 0.5
"""Seconds between two tries."""


P = ParamSpec("P")
R = TypeVar("R")


def patient(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Makes a method, which is one transaction that may be done twice, wait for a server that is away.

    It waits as long as `patience_seconds` of its object's `database`, and then raises what it always raised.
    """

    @functools.wraps(method)
    def waits(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        began: float | None = None
        while True:
            try:
                result = method(self, *args, **kwargs)
            except ServerGoneError as error:
                now, patience = time.monotonic(), self.database.patience_seconds
                if began is None and patience:
                    self.database.say(f"waits for the database, for {patience:.0f} s at most: {error}")
                began = now if began is None else began
                if now - began >= patience:
                    raise
                time.sleep(PAUSE_SECONDS)
            else:
                if began is not None:
                    self.database.say(f"the database answers again, after {time.monotonic() - began:.0f} s")
                return result

    return waits
