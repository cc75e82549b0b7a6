"""Ledgers of all versions are opened on both kinds of databases: older ones migrated, newer ones refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import postgresql
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from records import trial
from tools import needs

from dhen.errors import UserError
from trials.storage.ledger import Ledger, Setting
from trials.storage.schema import METADATA
from trials.storage.studies import Studies
from trials.storage.versions import MIGRATIONS, REVISIONS, VERSION_TABLE

NewUrl = Callable[[], str]
SETTING = Setting(
    directory="/runs/a",
    log="l",
    features={},
    seed=0,
    version=1,
    cluster={"name": "x", "hosts": 1, "gpus_per_host": 1, "hbm": 1},
)


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


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return ScriptDirectory.from_config(config)


def make_as_of(url: str, revision: str) -> None:
    """Makes a ledger as it was at a revision; the first is that of the time before versions."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        script = scripts()
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        with Operations.context(context):
            for name in REVISIONS[: REVISIONS.index(revision) + 1]:
                script.get_revision(name).module.upgrade()
        if revision != REVISIONS[0]:
            context.stamp(script, revision)
    engine.dispose()


def executed(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def selected(url: str, query: str) -> list[Any]:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        found = list(connection.scalars(sa.text(query)))
    engine.dispose()
    return found


def versions(url: str) -> list[str]:
    return selected(url, f"select version_num from {VERSION_TABLE}")


def numbers(url: str) -> list[int]:
    return selected(url, "select number from dhen_trial order by number")


def test_the_versions_are_those_of_the_migrations() -> None:
    history = [script.revision for script in scripts().walk_revisions()]
    assert tuple(reversed(history)) == REVISIONS


def test_a_new_ledger_has_the_tables_of_one_that_was_migrated(new_url: NewUrl) -> None:
    url = new_url()
    make_as_of(url, REVISIONS[0])
    Ledger(url, "a").close()
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()
    fresh = new_url()
    Ledger(fresh, "a").close()
    assert versions(url) == versions(fresh) == [REVISIONS[-1]]


@pytest.mark.parametrize("revision", [REVISIONS[0], REVISIONS[-1]])
def test_an_older_ledger_is_migrated_when_a_driver_opens_it(new_url: NewUrl, revision: str) -> None:
    """Its trials stay; who only reads changes nothing. One from before versions may lack a table."""
    url = new_url()
    make_as_of(url, revision)
    values = "('a', 0, 'candidate', 'infeasible', '{}', '{}', '[]')"
    executed(
        url,
        "insert into dhen_study (name, facts) values ('a', '{}')",
        f"insert into dhen_trial (study, number, kind, outcome, record, point, curve) values {values}",
        *(["drop table dhen_analysis"] if revision == REVISIONS[0] else []),
    )
    reader = Studies(url)
    assert [study.name for study in reader.all()] == ["a"]
    read = Ledger(url, "a", create=False)
    assert numbers(url) == [0]
    read.close()
    ledger = Ledger(url, "a")
    ledger.settle(SETTING)
    ledger.save(trial(1, Random(0)))
    assert numbers(url) == [0, 1]
    assert ledger.analyses.ablations() == ()
    assert versions(url) == [REVISIONS[-1]]
    reader.close()
    ledger.close()


def test_a_newer_ledger_is_refused(new_url: NewUrl) -> None:
    url = new_url()
    Ledger(url, "a").close()
    executed(url, f"update {VERSION_TABLE} set version_num = '9999'")
    for opens in (lambda: Ledger(url, "a"), lambda: Ledger(url, "a", create=False), lambda: Studies(url)):
        with pytest.raises(UserError, match=rf"newer dhen-search.*9999.*up to {REVISIONS[-1]}; upgrade"):
            opens()


def test_many_may_migrate_at_once(new_url: NewUrl) -> None:
    url = new_url()
    make_as_of(url, REVISIONS[0])
    program = "import sys; from trials.storage.ledger import Ledger; Ledger(sys.argv[1], 'a').close()"
    drivers = [subprocess.Popen([sys.executable, "-c", program, url], cwd=Path.cwd()) for _ in range(3)]
    assert [driver.wait(120) for driver in drivers] == [0] * 3
    assert versions(url) == [REVISIONS[-1]]


def test_alembic_is_asked_only_where_there_is_something_to_migrate(tmp_path: Path) -> None:
    """Importing it takes longer than all else that opening a ledger takes."""
    program = (
        "import sys; from trials.storage.ledger import Ledger\n"
        "for _ in range(2): Ledger(sys.argv[1], 'a').close()\n"
        "assert 'alembic' not in sys.modules"
    )
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert subprocess.run([sys.executable, "-c", program, url], check=False).returncode == 0
