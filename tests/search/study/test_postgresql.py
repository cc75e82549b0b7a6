"""Studies whose ledger is a PostgreSQL database, on a real server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from command_line import SMALL, TIMEOUT_SECONDS, Run, read_until, start, wait_for_trials
from postgresql import Server
from tools import needs

from search.read_study import read_study
from trials.records.trial_record import Outcome

pytestmark = needs("postgresql")


def test_a_study_waits_for_its_server_and_goes_on_after_ctrl_c(
    server: Server, dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    out, storage = tmp_path / "interrupted", f"storage={server.url}"
    process = start(click_log, out, environment, "trials=4", storage)
    wait_for_trials(out, 2)
    server.stop()
    try:
        # who has just come does not wait
        assert "the server runs" in dhen_search("status", out, code=2).stderr
        read_until(process, "waits for the database")
    finally:
        server.start()
    read_until(process, "the database answers again")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, errors
    before = read_study(out)
    done = [trial for trial in before.trials if trial.result.outcome is Outcome.COMPLETED]
    assert done
    dhen_search("run", "--data", click_log, "--out", out, "trials=4", storage, *SMALL)
    record = read_study(out)
    assert record.finished
    assert [trial.result.outcome for trial in record.trials] == [Outcome.COMPLETED] * 5
    assert all(len(trial.attempts) == 1 for trial in record.trials)
    for trial in done:
        assert record.trial(trial.number).with_result(test=None) == trial
    assert not (out / "study.db").exists()
    assert "4/4 candidates" in dhen_search("status", out).stdout  # which reads in brief
    assert server.rows("select count(*) from dhen_trial where study = 'interrupted'") == ["5"]
