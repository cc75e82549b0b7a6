"""Ctrl-C and worse at any moment: nothing finished is lost or done twice."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from command_line import SMALL, TIMEOUT_SECONDS, Run, run_process, start, wait_for_trials, wait_until
from warm_process import WarmProcess

from search.read_study import read_study
from trials.records.trial_record import Outcome
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger

ONE, TWO = ("parallel=1", "sampler=random"), ("parallel=2", "sampler=random")
"""One at a time, or two: random proposals are the same in whatever order trials end."""


def children_of(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("how", "at_once"),
    [
        pytest.param(signal.SIGINT, ONE, marks=pytest.mark.slow, id="Ctrl-C, one at a time"),
        pytest.param(signal.SIGINT, TWO, id="Ctrl-C, two at a time"),
        pytest.param(signal.SIGTERM, TWO, marks=pytest.mark.slow, id="SIGTERM, two at a time"),
        pytest.param(signal.SIGKILL, ONE, id="kill, one at a time"),
        pytest.param(signal.SIGKILL, TWO, marks=pytest.mark.slow, id="kill, two at a time"),
    ],
)
def test_goes_on_from_where_it_was(
    dhen_search: Run,
    click_log: Path,
    environment: dict[str, str],
    tmp_path: Path,
    how: signal.Signals,
    at_once: tuple[str, ...],
) -> None:
    out = tmp_path / "study"
    process = start(click_log, out, environment, "trials=2", *at_once)
    wait_for_trials(out, 2)
    assert ", running " in dhen_search("status", out).stdout
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the driver and its children
    else:
        process.send_signal(how)  # as a container does: the driver alone
    shown, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert "Traceback" not in errors
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        by_signal = " by SIGTERM" if how is signal.SIGTERM else ""
        assert f"interrupted{by_signal}; the same command goes on ({out})." in shown
    wait_until(lambda: not children_of(process.pid))
    before = read_study(out)
    assert not before.running
    assert ", not running" in dhen_search("status", out).stdout
    assert {trial.result.outcome for trial in before.trials} <= {Outcome.COMPLETED, Outcome.INTERRUPTED}
    if how is signal.SIGTERM:
        assert "broken off: Terminated" in (out / "driver.log").read_text()
        ledger = Ledger(sqlite_url(out / "study.db"), before.name)
        # committed by the driver itself, not concluded by a reader of what it left
        assert Outcome.RUNNING not in {trial.result.outcome for trial in ledger.trials()}
        ledger.close()
    finished = [trial for trial in before.trials if trial.result.outcome is Outcome.COMPLETED]
    assert finished
    if how is signal.SIGKILL:  # as it leaves one that is killed while it writes the best bundle
        (out / ".best.1.partial").mkdir()
    dhen_search("run", "--data", click_log, "--out", out, "trials=2", *SMALL, *at_once)
    assert not [*out.glob(".best.*")]
    record = read_study(out)
    assert [trial.number for trial in record.trials] == list(range(3))
    assert all(trial.result.outcome is Outcome.COMPLETED for trial in record.trials)
    for trial in finished:
        assert record.trial(trial.number).with_result(test=None) == trial
    for trial in before.trials:
        assert record.trial(trial.number).point == trial.point


@pytest.mark.parametrize("to_all", [False, True], ids=["to the command alone", "to all of its processes"])
def test_a_training_answers_sigterm_like_ctrl_c(
    dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path, to_all: bool
) -> None:
    """A container sends it to the command, a batch system to all processes of a job."""
    out = tmp_path / "bundle"
    words = ("train", "dcn_v2", "--data", click_log, "--out", out)
    slow = ("training.epochs=9999", "training.patience=9999", "training.batch_size=16")
    process = WarmProcess((*words, *slow), environment)
    assert any("validation NE" in line for line in process.stdout)  # it trains
    if to_all:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert errors.strip() == "dhen-search: interrupted by SIGTERM; what was finished is safe."
    wait_until(lambda: not children_of(process.pid))
    assert not out.exists()
    assert list(tmp_path.glob(".bundle.training.*"))  # from where the same command goes on


@pytest.mark.slow
def test_a_run_directory_that_is_deleted_ends_the_study_in_a_sentence(
    click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "study"
    process = start(click_log, out, environment, "trials=50")
    wait_for_trials(out, 1)
    shutil.rmtree(out, ignore_errors=True)  # some file may come while it is removed
    shown, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 2
    assert "Traceback" not in shown + errors
    assert len(errors.splitlines()) == 1
    assert str(out) in errors
    assert "moved or deleted" in errors
    wait_until(lambda: not children_of(process.pid))


def test_mlflow_is_rebuilt_from_the_ledger(study: Path, click_log: Path, environment: dict[str, str]) -> None:
    (study / "mlflow.db").unlink()  # a process that had it open would hold on to it
    words = ("run", "--data", click_log, "--out", study, "trials=4", *SMALL)
    assert run_process(words, environment, None).returncode == 0
    with sqlite3.connect(study / "mlflow.db") as connection:
        runs = connection.execute("select count(*) from runs").fetchone()[0]
    connection.close()
    assert runs == 1 + len(read_study(study).trials)
