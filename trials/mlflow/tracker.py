"""The study in MLflow: one experiment, a parent run for the study, a child run for each trial.

The only import of MLflow in the project, and a late one (it takes seconds). MLflow never holds what the
record does not: every `sync` makes the store agree with the record, and writes only what changed since
the last. What a run was last given is kept in two of its tags, so a restarted driver goes on where the
last one ended. Metrics can be added to a run but never taken back: where the record contradicts
what was logged (the baseline was replaced, say), the run is deleted and written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.mlflow.runs import KEY, RunContents, marks, run_key, study_sheet, trial_sheet
from trials.record import TrialRecord
from trials.storage.disk_full import free_space, is_disk_full
from trials.study_record import StudyRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Variables by which MLflow reports nothing to anyone; they must be set before MLflow is imported."""
LAYOUT = 5
"""Version of the layout of sheets, raised whenever they change: stores of older versions are then written anew."""
LOCK_SECONDS = 10.0
"""How long another process may hold the store before that is an error."""
METRICS_PER_BATCH = 800
PARAMS_PER_BATCH = 100
"""Params and tags per request: MLflow takes 1000 entries at once, of them 100 params and 100 tags."""
REVISION, LOGGED = "mlflow.dhen.revision", "mlflow.dhen.logged"
"""Names of tags for our own bookkeeping; MLflow shows none that begin with its name."""
PARENT = "mlflow.parentRunId"
VIEW = "candidates"
"""Name of the shared view that opens the experiment with the columns that matter, best NE first."""
VIEW_STATE = {
    "orderByKey": "metrics.`best_ne`",
    "orderByAsc": True,
    "selectedColumns": [
        "metrics.`best_ne`",
        "metrics.`best_ne_vs_baseline_percent`",
        "metrics.`flops`",
        "metrics.`examples_per_second`",
        "tags.`outcome`",
        "tags.`technique.planned`",
        "tags.`technique.executed`",
        "tags.`front`",
        "tags.`model`",
    ],
}
STUDY = "study"
"""Key of the parent run among the known runs; those of trials are their numbers."""


def database(directory: Path) -> Path:
    """Returns where the store of a study lies."""
    return directory / "mlflow.db"


def artifacts(directory: Path) -> Path:
    """Returns where the files of a study's runs lie."""
    return directory / "artifacts"


def store_uri(directory: Path) -> str:
    """Returns the store's name as MLflow wants it."""
    return f"sqlite:///{database(directory).absolute()}"


def check_store(directory: Path) -> None:
    """Fails at once where MLflow itself would try again for minutes.

    Raises:
        UserError: when there is a store and it is no database, or locked, or cannot be written.
    """
    path = database(directory)
    if not path.exists():
        return
    with (
        _remedy(directory),
        closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection,
    ):
        connection.execute("PRAGMA schema_version").fetchone()
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run in the store and what was last written to it."""

    id: str
    revision: str = ""
    logged: Mapping[str, str] = field(default_factory=dict)
    """What was last logged: the status; digests of params and artifacts; names of tags; by `metric.name` the count
    and digest of its readings."""


class Tracker:
    """Writes one study to MLflow. Made by `Tracker.open`."""

    def __init__(self, client: MlflowClient, directory: Path, name_model: Callable[[TrialRecord], str]):
        self._client = client
        self._directory = directory
        self._name_model = name_model
        self._experiment = ("", "")
        self._runs: dict[str, _Run] = {}
        self._seen: dict[str, tuple[TrialRecord, dict[str, bool], str]] = {}
        """For each run the very values that it agrees with: most of a study has not changed since the last
        time."""
        self._report: tuple[int, int] | None = None

    @classmethod
    def open(cls, directory: Path, *, name_model: Callable[[TrialRecord], str] = lambda trial: "") -> Tracker:
        """Opens the store of a study's directory; makes it, schema and all, where there is none.

        `name_model` names a trial's model in short, for the names of runs and the tag `model`.

        Raises:
            UserError: when the store is damaged, locked or cannot be written.
        """
        check_store(directory)
        with _remedy(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _make_store(database(directory))
            return cls(_client(store_uri(directory)), directory, name_model)

    def sync(self, record: StudyRecord, *, report: Path | None = None) -> None:
        """Makes MLflow agree with the record; `report`, if there, is put on the parent run when it changed.

        Raises:
            UserError: when the store is damaged, locked or cannot be written. What was not written then is
                written by the next successful call.
        """
        with _remedy(self._directory):
            self._open_experiment(record.name)
            study = study_sheet(record)
            parent = self._write(STUDY, study, _digest((LAYOUT, study)), {})
            baseline = next((trial for trial in record.trials if trial.number == record.baseline), None)
            compared = _compared(baseline) if baseline else ""
            context = _digest((LAYOUT, parent, compared))
            for trial in (*record.trials, *record.retrainings):
                self._sync_trial(trial, record, context, parent)
            self._attach(parent, report)

    def _sync_trial(self, trial: TrialRecord, record: StudyRecord, context: str, parent: str) -> None:
        """Syncs one trial's run; `context` is all that the run depends on beside the trial and its marks."""
        key, marked = run_key(trial), marks(trial, record)
        context = _digest((context, record.comparison(trial.number))) if marked["front"] else context
        last_seen = self._seen.get(key)
        if last_seen is not None and last_seen[0] is trial and last_seen[1:] == (marked, context):
            return
        revision = _digest((context, marked, trial.model_dump_json()))
        if key not in self._runs or self._runs[key].revision != revision:
            sheet = trial_sheet(trial, record, model_name=self._name_model(trial))
            self._write(key, sheet, revision, {PARENT: parent})
        self._seen[key] = (trial, marked, context)

    def _open_experiment(self, name: str) -> None:
        """Reads what the store knows of the study's runs, when the study is met for the first time."""
        if self._experiment[0] == name:
            return
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            location = artifacts(self._directory).absolute().as_uri()
            identity = self._client.create_experiment(name, location, _experiment_tags(name))
        else:
            identity = experiment.experiment_id
            if experiment.lifecycle_stage != "active":
                self._client.restore_experiment(identity)
        self._runs = dict(self._known_runs(identity))
        self._experiment = (name, identity)

    def _known_runs(self, experiment: str) -> Iterator[tuple[str, _Run]]:
        token = None
        while True:
            page = self._client.search_runs([experiment], max_results=1000, page_token=token)
            for run in page:
                tags = run.data.tags
                key = STUDY if tags.get("kind") == STUDY else tags.get(KEY, tags.get("trial.number"))
                if key is not None:
                    logged = json.loads(tags.get(LOGGED, "{}"))
                    yield key, _Run(id=run.info.run_id, revision=tags.get(REVISION, ""), logged=logged)
            token = page.token
            if not token:
                return

    def _write(self, key: str, sheet: RunContents, revision: str, tags: dict[str, str]) -> str:
        """Brings one run up to its sheet and returns its id; the revision is written last of all."""
        run = self._runs.get(key)
        if run and run.revision == revision:
            return run.id
        if run and key != STUDY and not _continues(run, sheet):
            self._client.delete_run(run.id)
            run = None
        if run is None:
            run = self._runs[key] = self._create(sheet, tags)
        logged = _logged(sheet)
        if run.logged.get("artifacts") != logged["artifacts"]:
            for name, text in sheet.artifacts.items():
                self._client.log_text(run.id, text, name)
        if run.logged.get("status") != logged["status"]:
            self._set_status(run, sheet)
        self._delete_tags(run, sheet)
        self._log(run, sheet, {**sheet.tags, **tags, REVISION: revision, LOGGED: json.dumps(logged)})
        self._runs[key] = _Run(id=run.id, revision=revision, logged=logged)
        return run.id

    def _create(self, sheet: RunContents, tags: dict[str, str]) -> _Run:
        """Creates a run with the tags by which it is found again, should the writing break off."""
        everything = {**sheet.tags, **tags, "mlflow.source.name": "dhen-search"}
        run = self._client.create_run(
            self._experiment[1], start_time=sheet.start_ms, tags=everything, run_name=sheet.name
        )
        return _Run(id=run.info.run_id)

    def _delete_tags(self, run: _Run, sheet: RunContents) -> None:
        """Deletes tags that were written of an earlier sheet and that this one has no more; a user's own stay."""
        gone = set(filter(None, run.logged.get("tags", "").split(","))) - sheet.tags.keys()
        there = (
            self._client.get_run(run.id).data.tags if gone else {}
        )  # some may be deleted: by hand, or before a kill
        for name in sorted(gone & there.keys()):
            self._client.delete_tag(run.id, name)

    def _log(self, run: _Run, sheet: RunContents, tags: dict[str, str]) -> None:
        """Logs params once, readings new since the last time, and tags last; in as few transactions as may be."""
        from mlflow.entities import Metric, Param, RunTag

        params = [] if "params" in run.logged else [Param(*item) for item in sheet.params.items()]
        metrics = [
            Metric(key, reading.value, reading.time_ms, reading.step)
            for key, readings in sheet.series.items()
            for reading in readings[_count(run, key) :]
        ]
        while len(params) > PARAMS_PER_BATCH or len(metrics) > METRICS_PER_BATCH:
            self._client.log_batch(run.id, metrics[:METRICS_PER_BATCH], params[:PARAMS_PER_BATCH])
            metrics, params = metrics[METRICS_PER_BATCH:], params[PARAMS_PER_BATCH:]
        self._client.log_batch(run.id, metrics, params, [RunTag(*item) for item in tags.items()])

    def _set_status(self, run: _Run, sheet: RunContents) -> None:
        if sheet.end_ms is not None:
            self._client.set_terminated(run.id, sheet.status, sheet.end_ms)
        else:
            self._client.update_run(run.id, sheet.status)

    def _attach(self, parent: str, report: Path | None) -> None:
        if report is None or not report.exists():
            return
        state = report.stat()
        if self._report != (state.st_mtime_ns, state.st_size):
            self._client.log_artifact(parent, str(report))
            self._report = (state.st_mtime_ns, state.st_size)


def _compared(baseline: TrialRecord) -> str:
    """Returns what the runs of other trials need of the baseline."""
    return repr((baseline.number, baseline.result.curve, baseline.result.validation))


def _experiment_tags(name: str) -> dict[str, str]:
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.note.content": f"DHEN architecture search; the report is among the artifacts of the run {name}.",
        f"mlflow.sharedViewState.{VIEW}": json.dumps(VIEW_STATE),
    }


def _continues(run: _Run, sheet: RunContents) -> bool:
    """Tells whether all that was logged still holds: the same params, and each metric's readings a beginning of
    the new ones."""
    if run.logged.get("params", _digest(sheet.params)) != _digest(sheet.params):
        return False
    metrics = (key.removeprefix("metric.") for key in run.logged if key.startswith("metric."))
    return all(_readings(sheet, key, _count(run, key)) == run.logged[f"metric.{key}"] for key in metrics)


def _logged(sheet: RunContents) -> dict[str, str]:
    """Returns what a run is told to remember of its sheet."""
    metrics = {f"metric.{key}": _readings(sheet, key, len(sheet.series[key])) for key in sheet.series}
    fixed = {"status": sheet.status, "params": _digest(sheet.params), "artifacts": _digest(sheet.artifacts)}
    return fixed | {"tags": ",".join(sorted(sheet.tags))} | metrics


def _readings(sheet: RunContents, key: str, count: int) -> str:
    return f"{count}:{_digest(sheet.series.get(key, ())[:count])}"


def _count(run: _Run, key: str) -> int:
    return int(run.logged.get(f"metric.{key}", "0:").partition(":")[0])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _make_store(path: Path) -> None:
    """Makes a store that is whole or not there: MLflow could not go on with one whose making was cut short."""
    if path.exists():
        return
    # a name of its own each time: MLflow holds on to a store whose making found no space
    making = path.with_name(f".{path.name}.{time.monotonic_ns()}.making")
    for leftover in path.parent.glob(f".{path.name}.*"):  # journals, too
        leftover.unlink()
    _client(f"sqlite:///{making.absolute()}")
    with (
        atomic_file(path) as partial,
        closing(sqlite3.connect(making)) as source,
        closing(sqlite3.connect(partial)) as target,
    ):
        source.backup(target)  # MLflow holds on to what it has made
    making.unlink()


def _client(uri: str) -> MlflowClient:
    """Returns a client of the store, which is made where there is none.

    MLflow is told to keep to itself: errors reach the caller as exceptions, not as log lines too, and what
    it uses of other libraries that is deprecated is not the user's concern.
    """
    os.environ.update(ENVIRONMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        client = mlflow.MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
        return client


@contextmanager
def _remedy(directory: Path) -> Iterator[None]:
    """Turns what goes wrong with the store into an error that says what to do."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, OSError) as error:
        raise _store_error(directory, error) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("mlflow", "alembic"):
            raise
        raise _store_error(directory, error) from error


def _store_error(directory: Path, error: Exception) -> UserError:
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    store = database(directory)
    if "locked" in reason:
        remedy = "Another process holds it: end that one, then run the same command again."
    elif "full" in reason or "disk I/O error" in reason or is_disk_full(error):
        remedy = f"{free_space(store)} Free some space there, then run the same command again."
    else:
        remedy = "Move it away or delete it, then run the same command again: it is made anew from the study."
    return UserError(f"{store}: MLflow's store cannot be used ({reason}). {remedy} No trial is lost by that.")
