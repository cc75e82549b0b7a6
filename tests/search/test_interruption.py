"""Ctrl-C and worse at any moment: nothing finished is lost or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_line import COMMAND, SMALL, Run

from search.directory import read_record
from trials.record import Outcome

PATIENCE_SECONDS = 120


def start(log: Path, out: Path, environment: dict[str, str], trials: int) -> subprocess.Popen[str]:
    words = ["run", "--data", str(log), "--out", str(out), f"trials={trials}", *SMALL]
    return subprocess.Popen(
        [str(COMMAND), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_trials(out: Path, count: int) -> None:
    """Until `count` trials have ended and the next has begun."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        events = out / "trials" / f"{count:05d}" / "events.jsonl"
        if events.exists():
            return
        time.sleep(0.02)
    raise AssertionError("the study did not get that far")


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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_goes_on_from_where_it_was(
    dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path, how: signal.Signals
) -> None:
    out = tmp_path / "study"
    process = start(click_log, out, environment, trials=4)
    wait_for_trials(out, 2)
    if how is signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the driver and its children
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    if how is signal.SIGINT:
        assert process.returncode == 130
    deadline = time.monotonic() + 10
    while children_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(process.pid) == []
    finished_before = {
        trial.number: trial for trial in read_record(out).trials if trial.outcome is Outcome.COMPLETED
    }
    assert len(finished_before) >= 2
    dhen_search("run", "--data", click_log, "--out", out, "trials=4", *SMALL)
    record = read_record(out)
    assert len(record.candidates) == 4
    assert [trial.number for trial in record.trials] == list(range(5))
    assert all(trial.outcome is Outcome.COMPLETED for trial in record.trials)
    for number, trial in finished_before.items():
        assert record.trial(number).model_copy(update={"test": None}) == trial
    undisturbed = tmp_path / "undisturbed"
    dhen_search("run", "--data", click_log, "--out", undisturbed, "trials=4", *SMALL)
    points = [[trial.point for trial in read_record(each).trials] for each in (out, undisturbed)]
    assert points[0] == points[1]


def test_two_drivers_of_one_study(
    dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "study"
    process = start(click_log, out, environment, trials=50)
    wait_for_trials(out, 1)
    words = ("run", "--data", click_log, "--out", out, "trials=50", *SMALL)
    assert "another process is running this study" in dhen_search(*words, code=2).stderr
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)


def test_mlflow_is_rebuilt_from_the_ledger(dhen_search: Run, study: Path, click_log: Path) -> None:
    import sqlite3

    (study / "mlflow.db").unlink()
    dhen_search("run", "--data", click_log, "--out", study, "trials=4", *SMALL)
    with sqlite3.connect(study / "mlflow.db") as connection:
        runs = connection.execute("select count(*) from runs").fetchone()[0]
    connection.close()
    assert runs == 1 + len(read_record(study).trials)
