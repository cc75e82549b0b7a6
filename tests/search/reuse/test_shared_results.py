"""Studies that share a ledger: what one has trained the others take over, and lose nothing with its directory."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import SMALL, Run

from search.read_study import read_study
from trials.record import TrialRecord
from trials.storage.database import sqlite_url

DONE_HERE = {
    "number": True,
    "plan": True,
    "attempts": True,
    "origin": {"started_at", "reused_from_study"},
    "result": {"seconds"},
}


def result(trial: TrialRecord) -> dict[str, object]:
    """What does not depend on who has trained it."""
    return trial.model_dump(exclude=DONE_HERE)


def weights(out: Path, number: int) -> bytes:
    return (out / "trials" / f"{number:05d}" / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sqlite_url(tmp_path_factory.mktemp("ledger") / "ledger.db")


@pytest.fixture(scope="module")
def first(dhen_search: Run, click_log: Path, shared: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("first") / "first"
    dhen_search("run", "--data", click_log, "--out", out, "trials=2", *SMALL, f"ledger={shared}")
    return out


def test_a_job_that_is_done_is_not_done_again(
    dhen_search: Run, click_log: Path, shared: str, first: Path, tmp_path: Path
) -> None:
    out = tmp_path / "second"
    words = ("run", "--data", click_log, "--out", out, "trials=2", *SMALL, f"ledger={shared}")
    said = dhen_search(*words).stdout
    before, after = read_study(first), read_study(out)
    assert [result(trial) for trial in after.trials] == [result(trial) for trial in before.trials]
    for trial in after.trials:
        assert trial.origin.reused_from_study is not None
        assert (trial.origin.reused_from_study.directory, trial.origin.reused_from_study.trial) == (
            str(first),
            trial.number,
        )
        assert (trial.attempts, trial.result.seconds) == ((), 0.0)
        assert trial.plan.technique == "dp"
    for winner in (after.baseline, *after.front):
        assert weights(out, winner) == weights(first, winner)
    assert "3 had been trained by other studies of the same ledger." in said
    assert f"trained as trial 1 of the study in {first}" in said
    assert f"trained as trial 1 of the study in {first}" in (out / "report.html").read_text()
    with closing(sqlite3.connect(out / "mlflow.db")) as connection:
        tags = connection.execute("select value from tags where key = 'reused_from_study'").fetchall()
    assert sorted(tags) == [(f"{first} trial {number}",) for number in range(3)]
    dhen_search(*words)
    assert read_study(out).trials == after.trials


def test_a_deleted_study_takes_nothing_with_it(
    dhen_search: Run, click_log: Path, shared: str, first: Path, tmp_path: Path
) -> None:
    """Its results stand; winners are trained again, for their weights, and nobody else."""
    before, out, bundle = read_study(first), tmp_path / "third", tmp_path / "bundle"
    hidden = shutil.move(first, tmp_path / "gone")
    try:
        words = ("trials=2", *SMALL, f"ledger={shared}", "name=third")
        said = dhen_search("run", "--data", click_log, "--out", out, *words).stdout
    finally:
        shutil.move(hidden, first)
    after = read_study(out)
    winners = {after.baseline, *after.front}
    for trial in after.trials:
        assert (trial.origin.reused_from_study is None) == (trial.number in winners)
        assert f"trial {trial.number} won, its weights are gone" in said or trial.number not in winners
    for own, its in zip(after.trials, before.trials, strict=True):
        assert own.result.validation is not None
        assert its.result.validation is not None
        assert own.result.validation.ne == pytest.approx(its.result.validation.ne, abs=1e-4)
    dhen_search("export", out, "--out", bundle)
    said = dhen_search("verify", bundle, "--data", click_log).stdout
    exported = json.loads((bundle / "bundle.json").read_text())
    assert f"at export NE {exported['validation']['ne']:.5f}" in said


def test_a_ledger_that_is_none(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table dhen_trial (number int)")
    words = ("run", "--data", click_log, "--out", tmp_path / "out", f"ledger={sqlite_url(path)}", *SMALL)
    assert "another version or another program" in dhen_search(*words, code=2).stderr
    assert not (tmp_path / "out" / "study.yaml").exists()
