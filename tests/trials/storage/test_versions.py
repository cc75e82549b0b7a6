"""The ledger's tables have a version on both kinds of databases; those of other programs are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import postgresql
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from tools import needs

from dhen.errors import UserError
from trials.store.database import MIGRATIONS, REVISIONS, VERSION_TABLE, migrate
from trials.store.ledger import Ledger, Studies
from trials.store.schema import METADATA

NewUrl = Callable[[], str]
COMPARED = {"version_table": VERSION_TABLE, "compare_server_default": True}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=needs("postgresql"))])
def new_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewUrl]:
    """Makes empty databases."""
    if request.param == "sqlite":
        yield lambda: f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'study.db'}"
        return
    with postgresql.served() as server:
        count = 0

        def new() -> str:
            nonlocal count
            count += 1
            server.rows(f"create database ledger{count}")
            return server.url.replace("/postgres?", f"/ledger{count}?")

        yield new


def executed(url: str, statement: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def refusals(url: str) -> set[str]:
    """What a driver and readers of a ledger print."""
    said = set()
    for opens in (lambda: Ledger(url, "a"), lambda: Ledger(url, "a", create=False), lambda: Studies(url)):
        with pytest.raises(UserError) as refused:
            opens()
        said.add(str(refused.value))
    return said


def test_the_versions_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    history = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(history)) == REVISIONS


def test_the_migrations_make_the_tables_of_a_new_ledger(new_url: NewUrl) -> None:
    migrated, fresh = new_url(), new_url()
    engine = sa.create_engine(migrated)
    with engine.begin() as connection:
        migrate(connection)
    engine.dispose()
    Ledger(fresh, "a").close()
    for url in (migrated, fresh):
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=COMPARED)
            assert compare_metadata(context, METADATA) == []
            assert context.get_current_revision() == REVISIONS[-1]
        engine.dispose()
    Ledger(migrated, "a").close()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            f"update {VERSION_TABLE} set version_num = '0004'",
            "before the first release: its tables have version 0004",
        ),
        (f"delete from {VERSION_TABLE}", "by another program: its tables have no version"),
        (f"drop table {VERSION_TABLE}", "by another program: its tables have no version"),
        (
            f"update {VERSION_TABLE} set version_num = '9999'",
            f"9999, this program knows versions up to {REVISIONS[-1]}",
        ),
    ],
)
def test_a_ledger_of_another_version_is_refused(new_url: NewUrl, statement: str, says: str) -> None:
    url = new_url()
    Ledger(url, "a").close()
    executed(url, statement)
    (said,) = refusals(url)
    assert says in said
    assert "name another database" in said


def test_alembic_is_asked_only_where_there_is_something_to_migrate(tmp_path: Path) -> None:
    """Importing it takes longer than all else that opening a ledger takes."""
    program = (
        "import sys; from trials.store.ledger import Ledger\n"
        "for _ in range(2): Ledger(sys.argv[1], 'a').close()\n"
        "assert 'alembic' not in sys.modules"
    )
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert subprocess.run([sys.executable, "-c", program, url], check=False).returncode == 0
