"""A study as an Optuna study: equal to the record, brought up to date, drawn by Optuna and its dashboard."""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import ProxyHandler, build_opener
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from command_line import SMALL, Run
from optuna.trial import FrozenTrial, TrialState
from postgresql import served
from records import bare, spaced_study, with_result
from sqlalchemy import create_engine, inspect
from tools import needs

from dashboards.names import trial_name
from dhen.errors import UserError
from search.read_study import read_study
from search.study.optuna_mirror import OptunaMirror, local_time
from trials.records.study_record import GrownAxis, StudyRecord
from trials.records.trial_record import Outcome, Proposal, TrialKind

STATES = {
    Outcome.COMPLETED: TrialState.COMPLETE,
    Outcome.STOPPED: TrialState.PRUNED,
    Outcome.INFEASIBLE: TrialState.PRUNED,
    Outcome.OUT_OF_MEMORY: TrialState.PRUNED,
    Outcome.DIVERGED: TrialState.FAIL,
    Outcome.FAILED: TrialState.FAIL,
    Outcome.RUNNING: TrialState.RUNNING,
}

CURVED = (Outcome.COMPLETED, Outcome.STOPPED)
"""Outcomes whose curves Optuna draws; it leaves out failed ones."""


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """A journal file, the quickest."""
    return str(tmp_path / "optuna.journal")


@pytest.fixture
def database(tmp_path: Path, unsynced: None) -> str:
    """SQLite, which most users have."""
    return f"sqlite:///{tmp_path / 'optuna.db'}"


def mirrored(storage: str, name: str = "ads-march") -> optuna.Study:
    """The study as a user loads it."""
    if "://" not in storage:
        backend = optuna.storages.journal.JournalFileBackend(storage)
        return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend))
    return optuna.load_study(study_name=name, storage=storage)


def by_number(study: optuna.Study) -> dict[int, FrozenTrial]:
    return {trial.user_attrs["trial"]: trial for trial in study.trials}


def assert_equal(
    study: optuna.Study, record: StudyRecord, interrupted: TrialState = TrialState.PRUNED
) -> None:
    """Every candidate stands there once, with all that the record says of it."""
    there = by_number(study)
    assert len(study.trials) == len(there)
    assert list(there) == [trial.number for trial in record.candidates]
    for trial in record.candidates:
        row, result = there[trial.number], trial.result
        assert row.state is STATES.get(result.outcome, interrupted)
        assert row.params == trial.point
        assert row.intermediate_values == {p.examples: p.validation.ne for p in result.curve}
        assert row.user_attrs["outcome"] == result.outcome
        assert row.user_attrs.get("error") == result.error
        assert row.user_attrs.get("technique_executed") == result.technique
        if row.state is TrialState.COMPLETE:
            assert row.values == [result.validation.ne, trial.job.flops]  # type: ignore[union-attr]
        if trial.plan.memory_excess is not None:
            assert row.constraints == {"0": trial.plan.memory_excess, "1": 0.0}


def test_it_says_what_the_record_says(database: str) -> None:
    record = spaced_study()
    written = OptunaMirror(database).sync(record)
    assert (written.study, written.trials) == ("ads-march", len(record.candidates))
    study = mirrored(database)
    assert_equal(study, record)
    assert study.metric_names == ["NE", "FLOPs"]
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MINIMIZE"]
    for trial in record.candidates:
        row = by_number(study)[trial.number]
        began = local_time(trial.origin.started_at)
        assert began is not None
        assert row.datetime_start == began
        assert row.datetime_complete == began + timedelta(seconds=trial.result.seconds or 0.0)
    assert study.user_attrs["baseline"]["NE"] == record.trial(0).result.validation.ne  # type: ignore[union-attr]
    assert study.user_attrs["values"]["embedding_dim"] == [8, 16, 32]
    assert {trial.user_attrs["trial"] for trial in study.best_trials} == set(record.front)
    assert len(record.front) > 1


def test_a_second_call_changes_nothing_and_adds_what_is_new(storage: str) -> None:
    before, after = spaced_study(6), spaced_study(11)
    OptunaMirror(storage).sync(before)
    kept = mirrored(storage)
    OptunaMirror(storage).sync(before)
    assert [trial._trial_id for trial in mirrored(storage).trials] == [
        trial._trial_id for trial in kept.trials
    ]
    OptunaMirror(storage).sync(after)
    study = mirrored(storage)
    assert study._study_id == kept._study_id
    assert_equal(study, after)


def test_what_runs_is_moved_on_until_it_ends_or_is_cut_short_for_good(storage: str) -> None:
    record = spaced_study(5)
    whole = record.trial(5).result
    begun = with_result(record, 5, outcome=Outcome.RUNNING, curve=(), validation=None, seconds=None)
    cut = with_result(record, 5, outcome=Outcome.INTERRUPTED, validation=None).replace(finished=False)
    later = with_result(
        record, 5, outcome=Outcome.RUNNING, curve=whole.curve[:4], validation=None, seconds=None
    )
    mirror = OptunaMirror(storage)
    identities = set()
    for moment in (begun, later, later, cut, record):  # the one that is cut short goes on
        mirror.sync(moment)
        study = mirrored(storage)
        assert_equal(study, moment, interrupted=TrialState.RUNNING)
        identities.add((study._study_id, by_number(study)[5]._trial_id))
    assert len(identities) == 1
    for moment, state in ((cut, TrialState.RUNNING), (cut.replace(finished=True), TrialState.PRUNED)):
        OptunaMirror(storage, name="ended").sync(moment)
        assert_equal(mirrored(storage, "ended"), moment, interrupted=state)


def test_a_contradiction_is_written_anew(storage: str) -> None:
    record = spaced_study(5)
    goes_on = with_result(record, 4, outcome=Outcome.RUNNING)
    mirror = OptunaMirror(storage)
    for moment in (record, goes_on, record):  # trial 4 has ended, runs again, and ends
        mirror.sync(moment)
        assert_equal(mirrored(storage), moment)
    fewer = spaced_study(3)  # a ledger that was restored from a copy
    OptunaMirror(storage).sync(fewer)
    assert_equal(mirrored(storage), fewer)


def test_what_others_do_to_it_is_mended(database: str) -> None:
    record = spaced_study(5)
    running = with_result(record, 5, outcome=Outcome.RUNNING, validation=None, seconds=None)
    mirror = OptunaMirror(database)
    mirror.sync(running)
    study = mirrored(database)
    # somebody gives the running trial up in the dashboard
    study._storage.set_trial_state_values(by_number(study)[5]._trial_id, TrialState.FAIL)
    mirror.sync(record)
    assert_equal(mirrored(database), record)
    optuna.delete_study(study_name="ads-march", storage=database)
    mirror.sync(spaced_study(6))
    assert_equal(mirrored(database), spaced_study(6))


def test_a_damaged_journal_is_said(tmp_path: Path, storage: str) -> None:
    OptunaMirror(storage).sync(spaced_study(2))
    journal = Path(storage)
    journal.write_text(journal.read_text().replace('"op_code"', '"op_code" broken', 3))
    with pytest.raises(UserError, match="cannot be used"):
        OptunaMirror(storage).sync(spaced_study(3))


def grown(axis: str, value: Any, before: Any) -> GrownAxis:
    end = "-".join(map(str, value)) if isinstance(value, tuple) else value
    return GrownAxis(
        axis=axis, highest=True, before=before, end=end, value=value, count=3, having=3, completed=5
    )


def test_a_grown_axis_of_numbers_is_a_wider_range_in_the_same_study(storage: str) -> None:
    record = spaced_study(5)
    mirror = OptunaMirror(storage)
    mirror.sync(record)
    identity = mirrored(storage)._study_id
    more = spaced_study(6, grown=(grown("embedding_dim", 64, 32),))
    last = more.trials[-1].replace(point=more.trials[-1].point | {"embedding_dim": 64})
    more = more.replace(trials=(*more.trials[:-1], last))
    mirror.sync(more)
    study = mirrored(storage)
    assert study._study_id == identity
    assert_equal(study, more)
    ends = [trial.distributions["embedding_dim"].high for trial in study.trials]
    assert ends == [32] * 5 + [64]


def test_a_grown_axis_of_widths_has_the_study_written_anew(storage: str) -> None:
    record = spaced_study(5)
    mirror = OptunaMirror(storage)
    mirror.sync(record)
    wider = record.replace(grown=(grown("layer.mlp.mlp", (512, 256), "256-128"),))
    last = wider.trials[-1].replace(point=wider.trials[-1].point | {"layer.mlp.mlp": "512-256"})
    wider = wider.replace(trials=(*wider.trials[:-1], last))
    mirror.sync(wider)
    study = mirrored(storage)
    assert_equal(study, wider)
    choices = {trial.distributions["layer.mlp.mlp"].choices for trial in study.trials}
    assert choices == {("128-64", "256-128", "512-256")}


def test_what_is_no_point_of_the_space_stands_in_attributes(storage: str) -> None:
    record = spaced_study(6)
    average = bare(7, ne=0.77, flops=5e6).replace(kind=TrialKind.AVERAGE).with_origin(members=(1, 2))
    proposal = Proposal(line=1, key="k", outside=True)
    outside = bare(8, ne=0.79, flops=1e6).with_origin(proposal=proposal)
    OptunaMirror(storage).sync(record.replace(trials=(*record.trials, average, outside)))
    study = mirrored(storage)
    assert len(study.trials) == 6
    assert study.user_attrs["averages"] == [
        {
            "trial": 7,
            "architecture": "average of trials 1 and 2",
            "outcome": "completed",
            "NE": 0.77,
            "FLOPs": 5e6,
        }
    ]
    assert [trial["trial"] for trial in study.user_attrs["outside_the_space"]] == [8]


def test_a_foreign_study_is_refused_and_left_alone(database: str) -> None:
    foreign = optuna.create_study(study_name="ads-march", storage=database)
    foreign.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    with pytest.raises(
        UserError,
        match=r"^\S+ has a study named 'ads-march' that is none of runs/ads-march; it stays as it is",
    ):
        OptunaMirror(database).sync(spaced_study(3))
    assert [trial.params.keys() for trial in mirrored(database).trials] == [{"x"}, {"x"}]
    OptunaMirror(database, name="ours").sync(spaced_study(3))
    with pytest.raises(UserError, match="is none of"):  # another of our studies, begun at another time
        OptunaMirror(database, name="ours").sync(spaced_study(3, created_at=1.0))


def test_a_database_of_another_program_is_refused_untouched(tmp_path: Path, database: str) -> None:
    with closing(
        sqlite3.connect(tmp_path / "optuna.db")
    ) as connection:  # as MLflow's: with migrations of its own
        connection.execute("create table alembic_version (version_num text)")
    with pytest.raises(UserError, match="needs one of its own"):
        OptunaMirror(database).sync(spaced_study(2))
    assert inspect(create_engine(database)).get_table_names() == ["alembic_version"]


def test_charts_of_optuna_are_drawn_without_a_warning(storage: str) -> None:
    record = spaced_study(40)
    OptunaMirror(storage).sync(record)
    study = mirrored(storage)
    ne: Any = {"target": lambda trial: trial.values[0], "target_name": "NE"}
    draw = optuna.visualization
    # the default evaluator warns of every target
    fanova = optuna.importance.FanovaImportanceEvaluator(n_trees=16, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front = draw.plot_pareto_front(study)
        parallel = draw.plot_parallel_coordinate(study, **ne)
        importances = draw.plot_param_importances(study, evaluator=fanova, **ne)
        slices = draw.plot_slice(study, params=["embedding_dim", "layer.block0"], **ne)
        history = draw.plot_optimization_history(study, **ne)
        curves = draw.plot_intermediate_values(study)
        timeline = draw.plot_timeline(study)
    completed = [trial for trial in record.candidates if trial.result.outcome is Outcome.COMPLETED]
    assert sum(len(trace.x) for trace in front.data) == len(completed)
    assert front.layout.xaxis.title.text, front.layout.yaxis.title.text == ("NE", "FLOPs")
    assert '"embedding_dim"' in parallel.to_json()
    assert {"embedding_dim", "layer.block0"} <= set(importances.data[0].y)
    assert sorted(set(slices.data[0].x)) == [8, 16, 32]
    assert len(history.data[0].x) == len(completed)
    assert len(curves.data) == sum(trial.result.outcome in CURVED for trial in record.candidates)
    assert sum(len(trace.x) for trace in timeline.data) == len(record.candidates)


@needs("postgresql")
def test_postgresql_holds_it_too() -> None:
    with served() as server, closing(OptunaMirror(server.url)) as mirror:
        record = spaced_study(4)
        running = with_result(record, 4, outcome=Outcome.RUNNING, validation=None, seconds=None)
        for moment in (running, record):
            mirror.sync(moment)
            storage = optuna.storages.RDBStorage(server.url)
            assert_equal(optuna.load_study(study_name="ads-march", storage=storage), moment)
            storage.remove_session()
            storage.engine.dispose()
        mirror.close()
        server.stop()
        with pytest.raises(UserError, match="cannot be used"):
            mirror.sync(record)
        server.start()
        assert mirror.sync(record).trials == 4


@contextmanager
def dashboard(storage: str) -> Iterator[str]:
    """The address at which optuna-dashboard serves the storage."""
    from optuna_dashboard import wsgi

    class Silent(WSGIRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with make_server("127.0.0.1", 0, wsgi(storage), handler_class=Silent) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def asked(address: str) -> Any:
    with build_opener(ProxyHandler({})).open(address, timeout=60) as answer:
        return json.load(answer)


def test_the_command_writes_a_study_that_the_dashboard_shows(
    dhen_search: Run, study: Path, database: str
) -> None:
    said = json.loads(dhen_search("optuna", study, "--storage", database, "--json").stdout)
    record = read_study(study)
    assert said == {"storage": database, "study": "study", "trials": 4}
    assert_equal(mirrored(database, "study"), record)
    dhen_search("optuna", study, "--storage", database)
    with dashboard(database) as address:
        (listed,) = asked(f"{address}/api/studies")["study_summaries"]
        shown = asked(f"{address}/api/studies/{listed['study_id']}")
    assert listed["study_name"] == "study"
    assert shown["objective_names"] == ["NE", "FLOPs"]
    assert len(shown["trials"]) == 4
    for row, trial in zip(shown["trials"], record.candidates, strict=True):
        attributes = {entry["key"]: entry["value"] for entry in row["user_attrs"]}
        quality = trial.result.validation
        assert quality is not None
        assert row["values"] == [quality.ne, trial.job.flops]
        assert row["state"] == "Complete"
        assert attributes["architecture"] == trial_name(trial)
        assert len(row["intermediate_values"]) == len(trial.result.curve)
        assert row["constraints"] == [trial.plan.memory_excess, 0.0]


def test_a_study_that_runs_keeps_it_up_to_date(
    dhen_search: Run, click_log: Path, database: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    dhen_search("run", "--data", click_log, "--out", out, "trials=1", f"optuna={database}", *SMALL)
    assert_equal(mirrored(database, "run"), read_study(out))
    identity = mirrored(database, "run")._study_id
    dhen_search("run", "--data", click_log, "--out", out, "trials=2", f"optuna={database}", *SMALL)
    assert_equal(mirrored(database, "run"), read_study(out))
    assert mirrored(database, "run")._study_id == identity


def test_bad_storages_are_refused_with_what_would_work(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    words = ("optuna", study, "--storage")
    assert "is a folder" in dhen_search(*words, tmp_path, code=2).stderr
    assert "SQLAlchemy URL" in dhen_search(*words, "nonsense://x y", code=2).stderr
    assert "its URL" in dhen_search(*words, study / "study.db", code=2).stderr
    (tmp_path / "notes.txt").write_text("no journal\n")
    assert "journal file" in dhen_search(*words, tmp_path / "notes.txt", code=2).stderr
    assert (tmp_path / "notes.txt").read_text() == "no journal\n"
    assert "no study here" in dhen_search("optuna", tmp_path, "--storage", "sqlite://", code=2).stderr
