"""MLflow's runs against the record: complete, idempotent, filled in after trouble, a user's own left alone."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import TIMEOUT_SECONDS, wait_until
from records import metrics, started, study
from rich.console import Console
from warm_process import WarmProcess

from dashboards.names import trial_name
from dhen.errors import UserError
from search.config import StudyConfig
from search.mlflow.fill_in import StudyRuns
from search.mlflow.store import artifacts, check_store, database, open_client, store_uri
from trials.records.findings import Choice, JudgedTrial, Winner
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, TrialKind

pytestmark = pytest.mark.usefixtures("unsynced")


def client(directory: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store_uri(directory))


def fill_in(directory: Path, *records: StudyRecord, **settings: Any) -> StudyRuns:
    """Fills in one record after the other, as one driver does."""
    writer = StudyRuns(directory, StudyConfig(**settings), Console(file=io.StringIO()))
    for record in records:
        writer.fill_in(record)
    return writer


def runs(directory: Path, name: str = "ads-march") -> list[Any]:
    own = client(directory)
    experiment = own.get_experiment_by_name(name)
    return list(own.search_runs([experiment.experiment_id], max_results=1000, order_by=["start_time"]))


def by_number(directory: Path) -> dict[int, Any]:
    return {
        int(run.data.tags["trial.number"]): run for run in runs(directory) if "trial.number" in run.data.tags
    }


def parent(directory: Path) -> Any:
    (found,) = (run for run in runs(directory) if run.data.tags["kind"] == "study")
    return found


def without(record: StudyRecord, count: int) -> StudyRecord:
    """The study before its last trials, with nothing judged yet."""
    return record.replace(trials=record.trials[:-count], finished=False, front=(), best=None, knee=None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyRecord]:
    directory = tmp_path_factory.mktemp("a run")
    record = study(12)
    (directory / "report.html").write_text("<p>report</p>")
    fill_in(directory, record)
    return directory, record


def test_one_run_a_trial_holds_what_the_record_says(finished: tuple[Path, StudyRecord]) -> None:
    directory, record = finished
    found = by_number(directory)
    assert sorted(found) == [trial.number for trial in record.trials]
    assert {run.data.tags["mlflow.parentRunId"] for run in found.values()} == {parent(directory).info.run_id}
    assert parent(directory).info.run_name == record.name
    for number, run in found.items():
        trial = record.trial(number)
        assert run.data.tags["outcome"] == trial.result.outcome.value
        assert run.data.tags["front"] == ("true" if number in record.front else "false")
        assert run.data.tags["model"] == trial_name(trial)
        assert run.data.metrics["cost/flops"] == trial.job.flops
        assert run.data.metrics.get("best_ne") == (
            trial.result.validation.ne if trial.result.validation else None
        )
        assert run.data.params["layer0.block1"] == trial.point["layer0.block1"]
    best = by_number(directory)[record.best]
    history = client(directory).get_metric_history(best.info.run_id, "ne")
    expected = [(point.examples, point.validation.ne) for point in record.trial(record.best).result.curve]
    assert [(entry.step, entry.value) for entry in history] == expected
    assert best.info.end_time - best.info.start_time == round(1000 * record.trial(record.best).result.seconds)
    own = client(directory)
    assert {file.path for file in own.list_artifacts(best.info.run_id)} == {"config.yaml", "cost.csv"}
    assert [file.path for file in own.list_artifacts(parent(directory).info.run_id)] == ["report.html"]
    assert list(artifacts(directory).rglob("report.html"))


def state(directory: Path) -> list[tuple[Any, ...]]:
    """Every row that could have been written."""
    with closing(sqlite3.connect(database(directory))) as connection:
        tables = ("runs", "metrics", "params", "tags", "latest_metrics")
        return [
            row for table in tables for row in sorted(connection.execute(f"select * from {table}"), key=str)
        ]


def test_a_second_call_and_a_restart_write_nothing(finished: tuple[Path, StudyRecord]) -> None:
    directory, record = finished
    before = state(directory)
    fill_in(directory, record, record)
    assert state(directory) == before


def test_a_study_that_grows_ends_as_one_written_at_once(tmp_path: Path) -> None:
    """A training of it begins anew, and a choice is written of trials that it leaves as they are, also of one that
    is no winner and whose run had all else before."""
    record = study(4)
    last = record.trials[-1].with_result(outcome=Outcome.RUNNING, validation=None, seconds=None)
    cut = [last.with_result(curve=last.result.curve[:count]) for count in (4, 0, 2)]
    running = [without(record, 1).replace(trials=(*record.trials[:-1], trial)) for trial in (*cut, last)]
    nothing = record.replace(trials=(), finished=False, front=(), best=None, knee=None)
    judged = tuple(
        JudgedTrial(
            trial=trial.number, percent=1.0, standard_error=2.0, close=True, by_period=(0.5,), worse_periods=0
        )
        for trial in record.trials
    )
    choice = Choice(
        front=record.front,
        baseline=0,
        best=record.best,
        lowest=record.best,
        winners=(Winner(trial=record.best, reasons=("best",)),),
        judged=judged,
    )
    fill_in(tmp_path / "grown", nothing, without(record, 2), running[0])
    fill_in(tmp_path / "grown", *running[1:])
    fill_in(tmp_path / "grown", record, record.replace(choice=choice))
    fill_in(tmp_path / "whole", record.replace(choice=choice))
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")
    assert all(run.data.tags["choice.close"] == "true" for run in by_number(tmp_path / "grown").values())


def contents(directory: Path) -> dict[int, Any]:
    """What a reader sees of each run, ids aside."""
    own = client(directory)
    return {
        number: (
            run.info.run_name,
            run.info.status,
            run.info.start_time,
            run.info.end_time,
            run.data.params,
            {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
            {
                key: sorted(
                    (m.step, m.value, m.timestamp) for m in own.get_metric_history(run.info.run_id, key)
                )
                for key in run.data.metrics
            },
        )
        for number, run in by_number(directory).items()
    }


def test_a_writing_that_broke_off_is_finished_by_the_next_driver(tmp_path: Path) -> None:
    """At any request, under the same run ids and without what was there once more."""
    record = study(2)
    fill_in(tmp_path / "whole", record)
    broken, requests = tmp_path / "broken", 0
    while True:
        writer = StudyRuns(broken, StudyConfig(), Console(file=io.StringIO()))
        requests += 1
        try:
            with breaking_off(after=requests):
                writer.fill_in(record)
            break
        except KeyboardInterrupt:
            continue
    assert requests > len(record.trials)
    assert contents(broken) == contents(tmp_path / "whole")
    assert len(runs(broken)) == len(record.trials) + 1


@contextmanager
def breaking_off(*, after: int) -> Iterator[None]:
    """Lets so many requests to MLflow through; the next one is a Ctrl-C."""
    from mlflow import MlflowClient

    left = after

    def counted(request: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return request(*args, **options)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_run", "log_inputs", "log_batch", "log_text", "set_terminated", "set_tag"):
            patch.setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
        yield


def test_a_new_verdict_changes_tags_alone_and_a_users_own_tags_and_runs_survive(tmp_path: Path) -> None:
    """Also a run that has the names of ours, and whatever becomes of the record."""
    record = study(6)
    fill_in(tmp_path, record)
    own, run = client(tmp_path), parent(tmp_path).info
    mine = own.create_run(
        run.experiment_id, tags={"trial.number": "3", "kind": "study", "mlflow.note": "mine"}
    )
    own.set_tag(run.run_id, "note", "mine")
    own.set_tag(by_number(tmp_path)[4].info.run_id, "winner", "mine")
    before = own.get_run(mine.info.run_id).to_dictionary()
    fill_in(tmp_path, record, record.replace(front=(), best=None, knee=None))
    assert own.get_run(mine.info.run_id).to_dictionary() == before
    own.delete_run(mine.info.run_id)
    assert "front" not in parent(tmp_path).data.tags
    assert parent(tmp_path).data.tags["note"] == "mine"
    assert by_number(tmp_path)[4].data.tags["winner"] == "mine"
    assert len(by_number(tmp_path)) == len(record.trials)
    assert {run.data.tags["front"] for run in by_number(tmp_path).values()} == {"false"}


def test_what_the_record_contradicts_is_logged_again_under_the_same_run_ids(tmp_path: Path) -> None:
    """Also of hundreds of points and parameters."""
    record = study(2)
    other, third = (number for number in (0, 1, 2) if number != record.baseline)
    of = record.trial(third)
    first, point = of.result.curve[0], {f"axis{number}": number for number in range(230)}
    curve = tuple(
        first.replace(examples=100 * step, validation=metrics(0.9 - step * 1e-5)) for step in range(1, 301)
    )
    big = of.replace(point=point).with_result(curve=curve)
    record = record.replace(trials=tuple(big if each is of else each for each in record.trials))
    fill_in(tmp_path, record)
    before = by_number(tmp_path)
    fill_in(tmp_path, record.replace(baseline=other))
    fill_in(tmp_path / "whole", record.replace(baseline=other))
    after, whole = by_number(tmp_path), by_number(tmp_path / "whole")
    for number, run in after.items():
        assert run.info.run_id == before[number].info.run_id
        assert run.data.metrics == pytest.approx(whole[number].data.metrics)
    assert after[other].data.metrics["best_ne_vs_baseline_percent"] == 0.0
    assert parent(tmp_path).data.tags["baseline"] == str(other)
    assert after[third].data.params["axis229"] == "229"
    history = client(tmp_path).get_metric_history(after[third].info.run_id, "training/loss")
    assert len(history) == 300


def test_a_deleted_store_is_rebuilt_by_the_next_driver(tmp_path: Path, environment: dict[str, str]) -> None:
    """In a process of its own, as a restart is: MLflow keeps a deleted store open as long as it lives."""
    record = study(3)
    fill_in(tmp_path, record)
    (tmp_path / "record.json").write_text(record.model_dump_json())
    database(tmp_path).unlink()
    code = """
from pathlib import Path
from trials.records.study_record import StudyRecord
from rich.console import Console
from search.config import StudyConfig
from search.mlflow.fill_in import StudyRuns
record = StudyRecord.model_validate_json(Path("record.json").read_text())
StudyRuns(Path(), StudyConfig(), Console()).fill_in(record)
"""
    process = WarmProcess((), environment, code=code, cwd=tmp_path)
    assert process.communicate(TIMEOUT_SECONDS) == ("", "")
    assert process.returncode == 0
    with closing(sqlite3.connect(database(tmp_path))) as connection:
        numbers = connection.execute("select value from tags where key = 'trial.number'").fetchall()
    assert sorted(int(number) for (number,) in numbers) == [trial.number for trial in record.trials]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts", "mlflow.db", "record.json"]


def test_a_driver_killed_while_it_makes_the_store_leaves_none(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    code = (
        "from search.mlflow.store import open_client, store_uri; from pathlib import Path; "
        f"open_client(store_uri(Path({str(tmp_path)!r})))"
    )
    nothing_kept = environment | {"DHEN_SEARCH_CACHE": str(tmp_path / "cache")}
    process = WarmProcess((), nothing_kept, code=code)
    wait_until(lambda: list(tmp_path.glob(".mlflow.db.*.making")), process)
    process.kill()
    process.communicate(TIMEOUT_SECONDS)
    assert not database(tmp_path).exists()
    record = study(3)
    fill_in(tmp_path, record)
    assert len(by_number(tmp_path)) == len(record.trials)
    assert not list(tmp_path.glob(".mlflow*"))


def test_an_empty_store_is_kept_for_later_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it is a store like the first; one that was damaged is made anew."""
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    open_client(store_uri(tmp_path / "first"))
    (kept,) = (tmp_path / "cache").rglob("*.db")
    whole = schema_of(kept)
    with monkeypatch.context() as patch:
        made_again = "mlflow.store.db.utils._initialize_tables"
        patch.setattr(made_again, lambda *_: pytest.fail("all tables are made once more"))
        fill_in(tmp_path / "second", study(2))
    assert len(by_number(tmp_path / "second")) == len(study(2).trials)
    assert schema_of(database(tmp_path / "second")) == schema_of(database(tmp_path / "first")) == whole
    kept.write_bytes(kept.read_bytes()[:5000] + b"damaged" * 1000)
    open_client(store_uri(tmp_path / "third"))
    assert schema_of(database(tmp_path / "third")) == schema_of(kept) == whole


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path / "cache"))
    fill_in(tmp_path / "study", study(2))
    assert len(by_number(tmp_path / "study")) == len(study(2).trials)


def schema_of(path: Path) -> list[tuple[str, list[str]]]:
    """Returns what makes each table and index, line by line; migrations write constraints in any order."""
    with closing(sqlite3.connect(path)) as connection:
        made = connection.execute(
            "select name, sql from sqlite_master where sql is not null order by name"
        ).fetchall()
    return [(name, sorted(line.strip(" \t,") for line in sql.splitlines())) for name, sql in made]


def test_a_place_that_cannot_be_used_is_told_with_the_remedy_and_left_alone(tmp_path: Path) -> None:
    database(tmp_path).write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match=r"mlflow\.db.*move it away.*No trial is lost"):
        fill_in(tmp_path, study(2))
    assert database(tmp_path).read_bytes().startswith(b"no database")
    with pytest.raises(UserError, match=r"mlflow\.db"):
        fill_in(database(tmp_path), study(2))


def test_a_locked_store_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.mlflow.store.LOCK_SECONDS", 0.1)
    with closing(sqlite3.connect(database(tmp_path), isolation_level=None)) as holder:
        holder.execute("create table t (x)")
        holder.execute("begin exclusive")
        with pytest.raises(UserError, match="another process holds it"):
            check_store(tmp_path)
    check_store(tmp_path)


def test_a_store_damaged_while_open_is_told_at_the_next_sync(tmp_path: Path) -> None:
    record = study(2)
    writer = fill_in(tmp_path, without(record, 1))
    with closing(sqlite3.connect(database(tmp_path))) as connection:
        connection.execute("drop table params")
        connection.commit()
    with pytest.raises(UserError, match=r"mlflow\.db cannot be used"):
        writer.fill_in(record)


def test_retrainings_are_runs_below_their_trial(tmp_path: Path) -> None:
    record = study(3)
    best = record.trial(record.best)
    seeds = tuple(
        best.replace(kind=TrialKind.RETRAINING, number=number)
        .with_origin(of=best.number, started_at=started(500 + number))
        .with_job(seed=number + 1)
        for number in range(2)
    )
    fill_in(tmp_path, *(record.replace(retrainings=seeds[:count]) for count in (1, 2)))
    trial_run = by_number(tmp_path)[best.number]
    below = [run for run in runs(tmp_path) if run.data.tags["kind"] == "retraining"]
    assert len(below) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in below} == {trial_run.info.run_id}
    assert {run.data.tags["configuration"] for run in below} == {trial_run.data.tags["configuration"]}
    assert trial_run.data.tags["mlflow.parentRunId"] == parent(tmp_path).info.run_id
    assert trial_run.data.metrics["seeds/count"] == 2
    assert trial_run.data.metrics["seeds/best_ne.mean"] == pytest.approx(best.result.validation.ne)


def test_the_study_is_described_its_log_is_a_dataset_and_test_is_added_when_it_is_scored(
    tmp_path: Path,
) -> None:
    record = study(3)
    log = record.log.replace(columns={"click": "label", "price": "numeric", "site": "categorical"})
    record = record.replace(log=log)
    unscored = tuple(trial.with_result(test=None) for trial in record.trials)
    unjudged = record.replace(trials=unscored, front=(), best=None, knee=None, finished=False)
    writer = fill_in(tmp_path, unjudged, data=("/data/ads.csv",))
    before = parent(tmp_path).data.tags["mlflow.note.content"]
    assert "test/ne" not in by_number(tmp_path)[record.best].data.metrics
    writer.fill_in(record)
    assert (
        by_number(tmp_path)[record.best].data.metrics["test/ne"] == record.trial(record.best).result.test.ne
    )
    assert parent(tmp_path).info.status == "FINISHED"
    note = parent(tmp_path).data.tags["mlflow.note.content"]
    assert note != before
    best = by_number(tmp_path)[record.best]
    assert f"/runs/{best.info.run_id})" in note
    assert f"/runs/{parent(tmp_path).info.run_id}/artifacts/report.html" in note
    assert client(tmp_path).get_experiment(best.info.experiment_id).tags["mlflow.note.content"] == note
    for run in runs(tmp_path):
        (entry,) = run.inputs.dataset_inputs
        assert (entry.dataset.name, entry.dataset.digest) == (log.name, log.fingerprint)
        assert [(tag.key, tag.value) for tag in entry.tags] == [("mlflow.data.context", "training")]
        assert json.loads(entry.dataset.source) == {"uri": "/data/ads.csv"}
        columns = json.loads(entry.dataset.schema)["mlflow_colspec"]
        assert [(column["name"], column["type"]) for column in columns] == [
            ("click", "double"),
            ("price", "double"),
            ("site", "string"),
        ]
        assert json.loads(entry.dataset.profile)["rows.test"] == log.rows["test"]


def test_a_copied_run_directory_has_files_of_its_own(tmp_path: Path) -> None:
    """MLflow keeps absolute paths: it would write the copy's files to the place of the original."""
    record, original, copy = study(1), tmp_path / "100 % original", tmp_path / "copy"
    fill_in(original, record)
    before = {path: path.read_bytes() for path in artifacts(original).rglob("*") if path.is_file()}
    shutil.copytree(original, copy)
    report = copy / "report.html"
    report.write_text("the copy's")
    fill_in(copy, record)
    assert {path: path.read_bytes() for path in artifacts(original).rglob("*") if path.is_file()} == before
    here = artifacts(copy).as_uri()
    assert client(copy).get_experiment(parent(copy).info.experiment_id).artifact_location == here
    assert all(run.info.artifact_uri == f"{here}/{run.info.run_id}/artifacts" for run in runs(copy))
    assert (
        artifacts(copy) / parent(copy).info.run_id / "artifacts" / "report.html"
    ).read_text() == "the copy's"
    assert parent(original).info.artifact_uri.startswith(artifacts(original).as_uri())


def test_a_study_is_known_by_when_it_was_created_not_by_when_its_first_trial_began(tmp_path: Path) -> None:
    """On a place that others use too; its first training may be broken off and begin anew."""
    record = study(3, finished=False).replace(created_at=1_795_000_000.0)
    again = record.replace(trials=(record.trials[0].with_origin(started_at=started(500)), *record.trials[1:]))
    place = {"tracking": f"sqlite:///{database(tmp_path)}"}
    for each in (record, again, record.replace(created_at=1_795_000_001.0)):
        fill_in(tmp_path / "run", each, **place)
    names = [experiment.name for experiment in client(tmp_path).search_experiments()]
    assert len([name for name in names if name.startswith("ads-march")]) == 2
