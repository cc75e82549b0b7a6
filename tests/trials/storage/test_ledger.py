"""The ledger keeps trials in tables to be queried, counts looks at the test split, says what ails a database."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dhen.errors import UserError
from trials.records.findings import Slices
from trials.records.trial_record import (
    Attempt,
    JobSummary,
    Metrics,
    Outcome,
    PlanSummary,
    Result,
    TrialKind,
    TrialRecord,
)
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger, StudySetting

CLUSTER = {"name": "small", "hosts": 2, "gpus_per_host": 2, "hbm": 2**30}
SETTING = StudySetting(
    directory="/runs/a", log="l", features={"numeric": []}, seed=3, version=2, cluster=CLUSTER
)


def record(number: int, outcome: Outcome = Outcome.COMPLETED, fingerprint: str = "f") -> TrialRecord:
    job = JobSummary(fingerprint=fingerprint, seed=3, model={"family": "dhen"}, training={"epochs": 1})
    quality = Metrics(ne=float("nan"), log_loss=0.3, auc=0.7, calibration=1.0, examples=10)
    return TrialRecord(
        number=number,
        kind=TrialKind.CANDIDATE,
        point={"depth": 2},
        job=job,
        result=Result(outcome=outcome, validation=quality),
    )


def trained(number: int, fingerprint: str = "f") -> TrialRecord:
    """Planned, out of memory, and one technique up completed."""
    plan = PlanSummary(
        strategy="dp",
        fits=True,
        examples_per_rank=8,
        memory_bytes={"parameters": 300, "activations": 200},
        step_seconds={"forward": 0.2, "all_reduce": 0.1, "hidden": 0.05},
    )
    short = Attempt(
        strategy="dp",
        outcome=Outcome.OUT_OF_MEMORY,
        predicted_bytes=500,
        needed_bytes=700,
        limit_bytes=600,
        error="out of memory",
    )
    done = Attempt(
        strategy="zero1",
        outcome=Outcome.COMPLETED,
        predicted_bytes=400,
        measured_bytes=440,
        predicted_step_seconds=0.3,
        measured_step_seconds=0.1 + 0.2,
        seconds=1.5,
    )
    return (
        record(number, fingerprint=fingerprint)
        .replace(attempts=(short, done))
        .with_plan(summary=plan)
        .with_result(validation=Metrics(ne=0.9, log_loss=0.3, auc=0.7, calibration=1.0, examples=10))
    )


def opened(url: str, study: str = "a", **changes: Any) -> Ledger:
    """To be written to."""
    ledger = Ledger(url, study)
    ledger.settle(SETTING.replace(**changes))
    return ledger


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_trials_come_back_as_they_went(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "study.db")
    ledger = opened(url)
    ledger.save(record(1, Outcome.RUNNING))
    ledger.save(record(0, Outcome.DIVERGED))
    ledger.save(trained(1))
    no_model = record(2, Outcome.INFEASIBLE, "").replace(job=JobSummary())
    ledger.save(no_model)
    ledger.close()
    there = [record(0, Outcome.DIVERGED), trained(1), no_model]
    found = Ledger(url, "a", create=False).trials()
    assert [each.model_dump_json() for each in found] == [each.model_dump_json() for each in there]
    assert Ledger(url, "b").trials() == []


def test_an_engineer_can_ask_in_sql(tmp_path: Path) -> None:
    """Job, cluster, plan and attempts each stand once, however often a trial is written."""
    path = tmp_path / "study.db"
    ledger = opened(sqlite_url(path))
    for _ in range(2):
        ledger.save(trained(0))
        ledger.save(trained(1))
    asked = """
        select s.name, c.name, c.ranks, j.seed, p.predicted_peak_bytes, p.predicted_step_seconds,
               a.strategy, a.outcome, a.measured_bytes
        from dhen_attempt a
        join dhen_trial t on t.study = a.study and t.number = a.trial
        join dhen_job j on j.fingerprint = t.job
        join dhen_plan p on p.id = t.plan
        join dhen_cluster c on c.id = p.cluster
        join dhen_study s on s.name = t.study
        where t.number = 1 order by a.position
    """
    whole = ("a", "small", 4, 3, 500, pytest.approx(0.25))
    assert rows(path, asked) == [
        (*whole, "dp", "out_of_memory", None),
        (*whole, "zero1", "completed", 440),
    ]
    for table in ("dhen_job", "dhen_plan", "dhen_cluster", "dhen_log", "dhen_study"):
        assert rows(path, f"select count(*) from {table}") == [(1,)], table
    assert rows(path, "select count(*) from dhen_attempt") == [(4,)]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_ledger import opened, trained
ledger = opened(sys.argv[1], sys.argv[3])
for number in range(10):
    ledger.save(trained(number, f"f{number}"))
"""


def test_several_may_begin_at_once(tmp_path: Path) -> None:
    """The tables are made once, and equal jobs of all of them are one row."""
    path = tmp_path / "shared.db"
    command = [sys.executable, "-c", WRITER, sqlite_url(path), str(Path(__file__).parent)]
    writers = [subprocess.Popen([*command, f"s{index}"]) for index in range(2)]
    assert [writer.wait(120) for writer in writers] == [0] * 2
    assert rows(path, "select count(*) from dhen_job") == [(10,)]
    assert rows(path, "select count(*) from dhen_trial") == [(20,)]


def test_tables_of_others(tmp_path: Path) -> None:
    paths = tmp_path / "foreign.db", tmp_path / "beside.db"
    for path, table in zip(paths, ("dhen_trial", "other"), strict=True):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"create table {table} (a int)")
    with pytest.raises(UserError, match="or by another program"):
        opened(sqlite_url(paths[0]))
    opened(sqlite_url(paths[1])).save(record(0))


def test_tables_of_an_earlier_version(tmp_path: Path) -> None:
    """Neither a reader nor a writer takes them for its own."""
    opened(sqlite_url(tmp_path / "study.db")).close()
    for column in ("dhen_trial.curve", "dhen_trial.point", "dhen_job.cost", "dhen_plan.details"):
        path, (table, name) = tmp_path / f"{column}.db", column.split(".")
        shutil.copy(tmp_path / "study.db", path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"alter table {table} drop column {name}")
        ledger = opened(sqlite_url(path))
        for use in (ledger.trials, lambda ledger=ledger: ledger.save(trained(0))):
            with pytest.raises(UserError, match=rf"{name}.*its tables are those of another version"):
                use()


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.touch()
    with pytest.raises(UserError, match="no such table"):
        Ledger(sqlite_url(path), "a", create=False).trials()
    assert path.read_bytes() == b""


def test_facts_and_looks(tmp_path: Path) -> None:
    ledger = Ledger(sqlite_url(tmp_path / "study.db"), "a")
    assert ledger.facts() is None
    ledger.change_facts(lambda _: {"log": "x"})
    ledger.change_facts(lambda _: {"log": "y"})
    assert ledger.facts() == {"log": "y"}
    assert ledger.test_looks() == 0
    ledger.count_test_look(3)
    ledger.count_test_look(3)
    assert ledger.test_looks() == 2


def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.store.database.SQLITE_TIMEOUT_SECONDS", 0.1)
    path = tmp_path / "study.db"
    ledger = opened(sqlite_url(path))
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="another process holds it"):
        ledger.save(record(0))
    holder.close()
    ledger.save(record(0))


def test_what_is_no_database_is_damaged_or_out_of_reach(tmp_path: Path) -> None:
    damaged = tmp_path / "study.db"
    damaged.write_bytes(b"this is no database" * 100)
    for url, says in (
        ("nonsense", "SQLAlchemy URL"),
        ("mysql://host/x", "MySQLdb|mysql"),
        (sqlite_url(damaged), "damaged"),
        (sqlite_url(tmp_path / "no" / "folder" / "study.db"), "permissions"),
    ):
        with pytest.raises(UserError, match=says):
            Ledger(url, "a")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a value of each kind."""
    path = tmp_path_factory.mktemp("ledger") / "study.db"
    ledger = opened(sqlite_url(path))
    ledger.change_facts(lambda facts: {"created": "now"})
    ledger.save(trained(0))
    ledger.keep_analysis(Slices(trial=0, column="site", seeds=(), slices=()))
    ledger.close()
    return path


@pytest.mark.parametrize(
    ("column", "value", "read"),
    [
        ("dhen_trial.record", "replace(record, '{', '[')", Ledger.trials),
        ("dhen_trial.record", "replace(record, 'result', 'resulu')", Ledger.trials),
        ("dhen_trial.record", "'7'", Ledger.trials),
        ("dhen_job.summary", "replace(summary, 'seed', 'seee')", Ledger.trials),
        ("dhen_plan.plan", "replace(plan, 'true', 'tsue')", Ledger.trials),
        ("dhen_study.facts", "replace(facts, ':', ';')", Ledger.facts),
        ("dhen_study.facts", "'7'", Ledger.facts),
        ("dhen_analysis.analysis", "replace(analysis, ':', ';')", lambda ledger: ledger.slices()),
        (
            "dhen_analysis.analysis",
            "replace(analysis, 'trial', 'tsial')",
            lambda ledger: ledger.slices(),
        ),
    ],
)
def test_a_damaged_value_is_said_in_words(
    whole: Path, tmp_path: Path, column: str, value: str, read: Callable[[Ledger], object]
) -> None:
    path, (table, name) = Path(shutil.copy(whole, tmp_path)), column.split(".")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"update {table} set {name} = {value}")
    with pytest.raises(
        UserError, match=rf"{path} holds a record that cannot be read .* Restore it from a copy"
    ):
        read(Ledger(sqlite_url(path), "a"))
