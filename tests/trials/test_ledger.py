"""The ledger keeps trials, counts looks at the test split, and says what ails a database."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from dhen.errors import UserError
from trials.ledger import Ledger, sqlite_url
from trials.record import Metrics, Outcome, TrialKind, TrialRecord


def record(number: int, outcome: Outcome = Outcome.COMPLETED, fingerprint: str = "f") -> TrialRecord:
    return TrialRecord(
        number=number,
        kind=TrialKind.CANDIDATE,
        outcome=outcome,
        fingerprint=fingerprint,
        point={"depth": 2},
        model={},
        training={},
        validation=Metrics(ne=0.9, log_loss=0.3, auc=0.7, calibration=1.0, examples=10),
    )


def test_trials_come_back_as_they_went(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "study.db")
    ledger = Ledger(url, "a")
    ledger.save(record(1, Outcome.RUNNING))
    ledger.save(record(0))
    ledger.save(record(1))
    ledger.close()
    assert Ledger(url, "a", create=False).trials() == [record(0), record(1)]
    assert Ledger(url, "b").trials() == []


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.touch()
    with pytest.raises(UserError, match="no such table"):
        Ledger(sqlite_url(path), "a", create=False).trials()
    assert path.read_bytes() == b""


def test_facts_and_looks(tmp_path: Path) -> None:
    ledger = Ledger(sqlite_url(tmp_path / "study.db"), "a")
    assert ledger.facts() is None
    ledger.note_facts({"log": "x"})
    ledger.note_facts({"log": "y"})
    assert ledger.facts() == {"log": "y"}
    assert ledger.test_looks() == 0
    ledger.count_test_look(3)
    ledger.count_test_look(3)
    assert ledger.test_looks() == 2


def test_a_damaged_database(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(UserError, match="damaged"):
        Ledger(sqlite_url(path), "a")


def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trials.ledger.SQLITE_TIMEOUT_SECONDS", 0.1)
    path = tmp_path / "study.db"
    ledger = Ledger(sqlite_url(path), "a")
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="another process holds it"):
        ledger.save(record(0))
    holder.close()
    ledger.save(record(0))


def test_a_database_out_of_reach(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="permissions"):
        Ledger(sqlite_url(tmp_path / "no" / "folder" / "study.db"), "a")
