"""Two drivers of one study on a real PostgreSQL server, through the command line; one of them is killed."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

from command_line import EARLY_CHECKPOINTS_CODE, TIMEOUT_SECONDS, Run, check_json, start, wait_until
from postgresql import Server
from tools import needs
from warm_process import WarmProcess

from search.mlflow.store import open_client, store_uri
from search.read_study import read_study
from search.run_directory import CHECKPOINTS, only_driver, only_writer, trial_folder
from search.selection import front_of
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind
from trials.store.ledger import Ledger

pytestmark = needs("postgresql")
SLOW = ("training.epochs=40", "training.patience=1000", "training.evaluate_every=800")
"""Trainings of some seconds."""


SECRET = "sesame8"
"""A password, which the server does not ask for."""


def url_of(server: Server) -> str:
    return server.url.replace("@/", f":{SECRET}@/")


def trials_of(server: Server, study: str) -> dict[int, int]:
    """Numbers of the drivers that run trials, by trial."""
    query = f"select number, driver from dhen_lease where study = '{study}' and what = 'trial'"
    return {int(number): int(driver) for number, driver in (row.split("|") for row in server.rows(query))}


def ended(driver: WarmProcess) -> str:
    """What a driver has said, with `--json`; it ended by itself."""
    said, errors = driver.communicate(timeout=TIMEOUT_SECONDS)
    assert driver.returncode == 0, f"{said}\n{errors}"
    assert "Traceback" not in errors
    check_json("worker", said)
    return said + errors


def is_sound(record: StudyRecord, out: Path, candidates: int) -> None:
    """Every number is there once, with one outcome; the front follows from the trials; MLflow has them all."""
    assert record.finished
    assert [trial.number for trial in record.trials] == list(range(candidates + 1))
    assert {trial.result.outcome for trial in record.trials} == {Outcome.COMPLETED}
    points = [trial.point for trial in record.trials if trial.kind is TrialKind.CANDIDATE]
    assert all(one != other for one, other in pairwise(sorted(points, key=str)))
    of_ledger = front_of([trial for trial in record.trials if trial.kind is TrialKind.CANDIDATE])
    assert record.networks_front == tuple(trial.number for trial in of_ledger)
    assert all(record.trial(number).result.test for number in (record.baseline, record.best))
    client = open_client(store_uri(out))
    experiment = client.get_experiment_by_name(record.name)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    tags = [run.data.tags for run in runs if "trial.number" in run.data.tags]
    outcomes = {each["trial.number"]: each["outcome"] for each in tags}
    assert len(outcomes) == len(tags)
    assert outcomes == {str(trial.number): trial.result.outcome.value for trial in record.trials}
    assert (out / "report.html").exists()
    assert (out / "best").is_dir()


def test_a_killed_drivers_candidate_goes_on_at_another(
    server: Server, dhen_search: Run, click_log: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The first driver of all dies, which wrote the report; the second does the rest and the end."""
    out, storage = tmp_path / "ads", f"storage={url_of(server)}"
    first = start(click_log, out, environment, "trials=3", storage, *SLOW, code=EARLY_CHECKPOINTS_CODE)
    second = None
    try:
        wait_until(lambda: (out / "trials" / "00001").exists(), first)
        words = ("worker", "--study", url_of(server), "--name", "ads", "--json")
        second = WarmProcess(words, environment, code=EARLY_CHECKPOINTS_CODE)
        refused = dhen_search("run", "--out", out, code=2).stderr
        assert "another process is running this study" in refused
        assert "dhen-search worker" in refused
        lost, drivers = -1, set[int]()

        def both_train() -> bool:
            nonlocal lost, drivers
            held = trials_of(server, "ads")
            drivers = set(held.values())
            lost = min(held, key=held.__getitem__, default=-1)
            return len(drivers) == 2 and any((trial_folder(out, lost) / CHECKPOINTS).glob("after-*"))

        wait_until(both_train, second)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        wait_until(lambda: min(drivers) not in trials_of(server, "ads").values(), second)
        said = ended(second)
    finally:
        for driver in (first, second):
            if driver is not None and driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.communicate()
    record = read_study(out)
    is_sound(record, out, 3)
    tries = [attempt.outcome for attempt in record.trial(lost).attempts]
    assert tries == [Outcome.INTERRUPTED, Outcome.COMPLETED]
    assert record.trial(lost).attempts[0].lost_its_driver
    assert f"trial {lost}: its driver died (process {first.pid} on" in said
    assert f"trial {lost} goes on here, from its checkpoint" in said
    assert all(len(trial.attempts) == 1 for trial in record.trials if trial.number != lost)
    assert server.rows("select count(*) from dhen_driver where study = 'ads'") == ["0"]
    assert "is finished" in dhen_search("worker", "--study", server.url, "--name", "ads", code=2).stderr
    other = dhen_search("run", "--out", out, f"storage={url_of(server)}x", code=2).stderr
    assert "holds another study (storage: 'postgresql://postgres:***@" in other
    # the settings that a person has written have it, and nothing else
    told = [path for path in out.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [path.name for path in told] == ["study.yaml"]
    assert SECRET not in said + other + "".join(server.rows("select facts from dhen_study"))


def test_sqlite_takes_one_driver(dhen_search: Run, study: Path, click_log: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{study / 'study.db'}"
    refused = dhen_search("worker", "--study", url, code=2).stderr
    assert "takes one driver" in refused
    assert "storage=postgresql://" in refused
    with only_driver(study):
        again = dhen_search("run", "--out", study, code=2).stderr
    assert "another process is running this study" in again
    assert "worker" not in again
    with only_writer(url, "study"):  # from another run directory
        words = ("run", "--data", click_log, "--out", tmp_path / "other", "name=study", f"storage={url}")
        assert "SQLite takes one driver" in dhen_search(*words, code=2).stderr


def test_what_a_further_driver_is_refused(server: Server, dhen_search: Run) -> None:
    Ledger(server.url, "none").close()
    assert "no study" in dhen_search("worker", "--study", server.url, "--name", "none", code=2).stderr
    unreadable = dhen_search("worker", "--study", f"postgresql:/x:{SECRET}@y", code=2).stderr
    assert SECRET not in unreadable
