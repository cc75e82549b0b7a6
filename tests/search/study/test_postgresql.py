"""Studies whose ledger is a PostgreSQL database, on a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import SMALL, TIMEOUT_SECONDS, Run, read_until, start, wait_for_trials
from postgresql import Server, served
from tools import needs

from search.read_study import read_study
from trials.record import Outcome

pytestmark = needs("postgresql")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as server:
        yield server


def words(log: Path, out: Path, *more: str) -> tuple[object, ...]:
    return ("run", "--data", log, "--out", out, *more, *SMALL)


def goes_on(dhen_search: Run, out: Path, command: tuple[object, ...]) -> None:
    """The same command ends the study, and leaves what was finished as it was."""
    before = read_study(out)
    done = [trial for trial in before.trials if trial.result.outcome is Outcome.COMPLETED]
    assert done
    dhen_search(*command)
    record = read_study(out)
    assert record.finished
    assert [trial.result.outcome for trial in record.trials] == [Outcome.COMPLETED] * 4
    for trial in done:
        assert record.trial(trial.number).with_result(test=None) == trial


def test_a_study_goes_on_after_ctrl_c(
    server: Server, dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out, storage = tmp_path / "interrupted", f"storage={server.url}"
    process = start(click_log, out, environment, "trials=3", storage)
    wait_for_trials(out, 2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, errors
    goes_on(dhen_search, out, words(click_log, out, "trials=3", storage))
    assert not (out / "study.db").exists()
    assert "3/3 candidates" in dhen_search("status", out).stdout  # which reads in brief
    assert server.rows("select count(*) from dhen_trial where study = 'interrupted'") == ["4"]


def test_a_study_waits_for_a_server_that_goes_away(
    server: Server, dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out, storage = tmp_path / "alone", f"storage={server.url}"
    process = start(click_log, out, environment, "trials=3", storage)
    wait_for_trials(out, 2)
    server.stop()
    try:
        # who has just come does not wait
        assert "the server runs" in dhen_search("status", out, code=2).stderr
        read_until(process, "waits for the database")
    finally:
        server.start()
    said, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, errors
    assert "the database answers again" in said
    record = read_study(out)
    assert record.finished
    assert [trial.result.outcome for trial in record.trials] == [Outcome.COMPLETED] * 4
    assert all(len(trial.attempts) == 1 for trial in record.trials)
