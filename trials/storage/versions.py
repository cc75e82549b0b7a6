"""Versions of the ledger's tables: a ledger of an earlier release is migrated when it is opened, by Alembic.

The version stands in the database, in a table of its own name, since MLflow and Optuna, which may have the same
database, use Alembic's default name. Alembic takes a third of a second to import, so it is asked only where there
is something to migrate: a ledger that is up to date costs a few queries, and a new one is made as it is now
(docs/decisions/0051-many-drivers.md).
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from dhen.errors import UserError

VERSION_TABLE = "dhen_alembic_version"
REVISIONS = ("0005",)
"""All versions of the tables, the newest last; each has a file in `trials/storage/migrations/versions`. Versions
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
    """Returns the version of a database's tables; None where it has no ledger.

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
    _one_at_a_time(connection)
    version = check_version(connection, tables, url)
    if version is None:
        tables.create_all(connection)
        VERSION.create(connection)
        connection.execute(sa.insert(VERSION).values(version_num=REVISIONS[-1]))
    elif version != REVISIONS[-1]:  # else another process was first
        migrate(connection)


def migrate(connection: sa.Connection) -> None:
    """Runs all migrations that come after the database's version, or all of them where it has none."""
    from alembic import command  # late: most ledgers are up to date
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")


def _one_at_a_time(connection: sa.Connection) -> None:
    """Lets other processes that would make tables wait until the transaction ends."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(SCHEMA_LOCK)))
