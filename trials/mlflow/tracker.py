"""The study in MLflow: one experiment, a parent run for the study, a child run for each trial, and below a trial's
run those of its retrainings.

MLflow is imported in this folder alone, and late (it takes seconds). MLflow never holds what the
record does not: every `sync` makes the store agree with the record, and writes only what changed since
the last. What a run was last given is kept in two of its tags, so a restarted driver goes on where the
last one ended. Metrics can be added to a run but never taken back: where the record contradicts
what was logged (the baseline was replaced, say), the run is deleted and written anew.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dhen.errors import UserError
from trials.mlflow.log_dataset import dataset_input
from trials.mlflow.runs import KEY, RunContents, marks, run_key, study_sheet, trial_sheet
from trials.mlflow.series import seeds_of
from trials.mlflow.server import is_database, open_server, server_errors, take_addresses_along
from trials.mlflow.store import (
    LOCK_SECONDS,
    STUDY_ID,
    artifacts,
    database,
    local_path,
    open_store,
    store_errors,
)
from trials.mlflow.view import VIEWS, view_link, view_tags
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

LAYOUT = 6
"""Version of the layout of sheets, raised whenever they change: stores of older versions are then written anew."""
METRICS_PER_BATCH = 800
PARAMS_PER_BATCH = 100
"""Params and tags per request: MLflow takes 1000 entries at once, of them 100 params and 100 tags."""
REVISION, LOGGED = "mlflow.dhen.revision", "mlflow.dhen.logged"
"""Names of tags for our own bookkeeping; MLflow shows none that begin with its name."""
PARENT = "mlflow.parentRunId"
NOTE = "mlflow.note.content"
"""Tag of a run or an experiment that MLflow shows as its description, in Markdown."""
STUDY = "study"
"""Key of the parent run among the known runs; those of trials are their numbers."""
SERVER_SECONDS = 60.0
"""Seconds after which a writing to a server ends with what it has come to."""

NameModel = Callable[[TrialRecord], str]
LinkTo = Callable[[int | None], str | None]
"""Returns the link to the run of the trial with this number, of the study where it is None; None where there is
no such run."""
Describe = Callable[[StudyRecord, LinkTo, Mapping[str, str]], str]
"""Writes a study's description, given links to runs, and those to views by what they show."""


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

    def __init__(
        self,
        client: MlflowClient,
        directory: Path,
        server: str | None,
        name_model: NameModel,
        describe: Describe | None,
        files: Sequence[str],
    ):
        self.client = client
        self._directory, self._server = directory, server
        self._name_model, self._describe, self._files = name_model, describe, files
        self.name = ""
        """Name of the study's experiment, once it was synced."""
        self._experiment = ("", "")
        self._experiment_tags: dict[str, str] = {}
        self._runs: dict[str, _Run] = {}
        self._seen: dict[str, tuple[TrialRecord, dict[str, bool], str]] = {}
        """For each run the very values that it agrees with: most of a study has not changed since the last
        time."""
        self._note: str | None = None
        self._report: tuple[int, int] | None = None
        self._deadline = float("inf")

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        server: str | None = None,
        name_model: NameModel = lambda trial: "",
        describe: Describe | None = None,
        files: Sequence[str] = (),
    ) -> Tracker:
        """Opens the store of a study's directory, made where there is none, or reaches a tracking server.

        Args:
            directory: the run directory.
            server: address of a tracking server to write to; None for the directory's own store.
            name_model: names a trial's model in short, for the names of runs and the tag `model`.
            describe: writes the study's description in Markdown; without it the run has none.
            files: paths of the study's log, the source of MLflow's dataset.

        Raises:
            UserError: when the store is damaged, locked or cannot be written, or the server does not answer or
                refuses.
        """
        client = open_server(server) if server else open_store(directory)
        return cls(client, directory, server, name_model, describe, files)

    def sync(self, record: StudyRecord, *, report: Path | None = None) -> None:
        """Makes MLflow agree with the record; `report`, if there, is put on the parent run when it changed.

        Raises:
            UserError: when the store is damaged, locked or cannot be written, or the server does not answer,
                refuses or is slow. What was not written then is written by the next successful call.
        """
        if self._server and not record.trials:
            return  # what a study is known by on a server that others use too begins with its first trial
        self._deadline = time.monotonic() + SERVER_SECONDS if self._server else float("inf")
        try:
            with self.errors():
                self._sync(record, report)
        except UserError:
            # a request whose answer was lost may have been done: the next call looks what is there
            self._experiment, self._seen = ("", ""), {}
            raise

    def errors(self) -> AbstractContextManager[None]:
        """Returns a context in which what goes wrong with MLflow becomes a UserError."""
        return server_errors(self._server) if self._server else store_errors(self._directory)

    @property
    def experiment(self) -> str:
        """The id of the study's experiment, once it was synced."""
        return self._experiment[1]

    def run_of(self, number: int) -> str:
        """Returns the id of the run of a trial, once it was synced."""
        return self._runs[str(number)].id

    def _sync(self, record: StudyRecord, report: Path | None) -> None:
        self._open_experiment(record)
        study = study_sheet(record)
        parent = self._write(STUDY, study, _digest((LAYOUT, study)), {}, record)
        self._tag_experiment(view_tags() | {"mlflow.experimentKind": "custom_model_development"})
        baseline = next((trial for trial in record.trials if trial.number == record.baseline), None)
        context = _digest((LAYOUT, _compared(baseline) if baseline else ""))
        for trial in (*record.trials, *record.retrainings):
            self._check_deadline()
            self._sync_trial(trial, record, context, parent)
        self._write_note(record, parent)
        self._attach(parent, report)

    def _check_deadline(self) -> None:
        """Raises:
        UserError: where a server has taken too long by now.
        """
        if time.monotonic() > self._deadline:
            raise UserError(
                f"{self._server}: the MLflow tracking server is slow: what it has not been told within "
                f"{SERVER_SECONDS:.0f} s follows later."
            )

    def _sync_trial(self, trial: TrialRecord, record: StudyRecord, context: str, study: str) -> None:
        """Syncs one trial's run; `context` is all that the run depends on beside the trial, its marks, its
        retrainings, what was decided of it, and its parent."""
        key, marked = run_key(trial), marks(trial, record)
        retrained = self._runs.get(str(trial.origin.of)) if trial.kind is TrialKind.RETRAINING else None
        parent = retrained.id if retrained else study
        seeds = [(seed.number, seed.result.validation, seed.result.test) for seed in seeds_of(trial, record)]
        decided = (record.comparison(trial.number), *_chosen(trial.number, record))
        context = _digest((context, parent, seeds, decided))
        last_seen = self._seen.get(key)
        if last_seen is not None and last_seen[0] is trial and last_seen[1:] == (marked, context):
            return
        revision = _digest((context, marked, trial.model_dump_json()))
        if key not in self._runs or self._runs[key].revision != revision:
            sheet = trial_sheet(trial, record, model_name=self._name_model(trial))
            self._write(key, sheet, revision, {PARENT: parent}, record)
        self._seen[key] = (trial, marked, context)

    def _open_experiment(self, record: StudyRecord) -> None:
        """Reads what the store knows of the study's runs, when the study is met for the first time."""
        if self._experiment[0] == record.name:
            return
        identity, location = _identity(record), None
        # of a database MLflow would put the files into the working directory
        if self._server is None or is_database(self._server):
            location = artifacts(self._directory).absolute().as_uri()
        if self._server is None:
            experiment = self.client.get_experiment_by_name(record.name)
        else:
            earlier = _identity(record, since=_began(record))
            experiment = self._experiment_on_server(identity) or self._experiment_on_server(earlier)
        if experiment is None:
            name = self._free_name(record.name, identity)
            number = self.client.create_experiment(name, location, {STUDY_ID: identity})
            experiment = self.client.get_experiment(number)
        number = experiment.experiment_id
        if experiment.lifecycle_stage != "active":
            self.client.restore_experiment(number)
        self._experiment_tags = dict(experiment.tags)
        self._runs = self._known_runs(number)
        there = experiment.artifact_location
        if self._server and location and self._lie_at(location) and not self._lie_at(there):
            take_addresses_along(self._server, number, there, location)
        self.name, self._experiment = experiment.name, (record.name, number)

    def _lie_at(self, address: str) -> bool:
        """Tells whether files of the study's runs lie there: those of a copy's original do, and stay its own."""
        return any((local_path(address) / run.id).exists() for run in self._runs.values())

    def _experiment_on_server(self, identity: str) -> Experiment | None:
        """Returns this study's experiment on a server that others use too, where names say nothing."""
        from mlflow.entities import ViewType

        found = self.client.search_experiments(
            view_type=ViewType.ALL, max_results=1, filter_string=f"tags.`{STUDY_ID}` = '{identity}'"
        )
        return found[0] if found else None

    def _free_name(self, name: str, identity: str) -> str:
        """Returns the study's name, with some of its identity behind it where the name is another's."""
        return name if self.client.get_experiment_by_name(name) is None else f"{name} {identity[:6]}"

    def _known_runs(self, experiment: str) -> dict[str, _Run]:
        """Returns the runs by their keys; a run that is there twice, because the answer to its making was lost, is
        deleted once."""
        known: dict[str, _Run] = {}
        for run in self._runs_of(experiment):
            tags = run.data.tags
            key = STUDY if tags.get("kind") == STUDY else tags.get(KEY, tags.get("trial.number"))
            if key in known:
                self.client.delete_run(run.info.run_id)
            elif key is not None:
                logged = json.loads(tags.get(LOGGED, "{}"))
                known[key] = _Run(id=run.info.run_id, revision=tags.get(REVISION, ""), logged=logged)
            if key == STUDY:
                self._note = tags.get(NOTE)
        return known

    def _runs_of(self, experiment: str) -> Iterator[Run]:
        """Yields all runs; those that were written to the end come first."""
        token = None
        unfinished: list[Run] = []
        while True:
            page = self.client.search_runs([experiment], max_results=1000, page_token=token)
            for run in page:
                if REVISION in run.data.tags:
                    yield run
                else:
                    unfinished.append(run)
            token = page.token
            if not token:
                yield from unfinished
                return

    def _write(
        self, key: str, sheet: RunContents, revision: str, tags: dict[str, str], record: StudyRecord
    ) -> str:
        """Brings one run up to its sheet and returns its id; the revision is written last of all."""
        run = self._runs.get(key)
        if run and run.revision == revision:
            return run.id
        if run and key != STUDY and not _continues(run, sheet):
            self.client.delete_run(run.id)
            run = None
        if run is None:
            run = self._runs[key] = self._create(sheet, tags)
        logged = _logged(sheet)
        logged["dataset"] = _digest((record.log, self._files))
        if run.logged.get("dataset") != logged["dataset"]:
            self.client.log_inputs(run.id, [dataset_input(record.log, self._files)])
        if run.logged.get("artifacts") != logged["artifacts"]:
            for name, text in sheet.artifacts.items():
                self.client.log_text(run.id, text, name)
        if (run.logged.get("status"), run.logged.get("name")) != (logged["status"], logged["name"]):
            self._set_status(run, sheet)
        self._delete_tags(run, sheet)
        self._log(run, sheet, {**sheet.tags, **tags, REVISION: revision, LOGGED: json.dumps(logged)})
        self._runs[key] = _Run(id=run.id, revision=revision, logged=logged)
        return run.id

    def _create(self, sheet: RunContents, tags: dict[str, str]) -> _Run:
        """Creates a run with the tags by which it is found again, should the writing break off."""
        everything = {**sheet.tags, **tags, "mlflow.source.name": "dhen-search"}
        run = self.client.create_run(
            self._experiment[1], start_time=sheet.start_ms, tags=everything, run_name=sheet.name
        )
        return _Run(id=run.info.run_id)

    def _delete_tags(self, run: _Run, sheet: RunContents) -> None:
        """Deletes tags that were written of an earlier sheet and that this one has no more; a user's own stay."""
        gone = set(filter(None, run.logged.get("tags", "").split(","))) - sheet.tags.keys()
        there = (
            self.client.get_run(run.id).data.tags if gone else {}
        )  # some may be deleted: by hand, or before a kill
        for name in sorted(gone & there.keys()):
            self.client.delete_tag(run.id, name)

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
            self.client.log_batch(run.id, metrics[:METRICS_PER_BATCH], params[:PARAMS_PER_BATCH])
            metrics, params = metrics[METRICS_PER_BATCH:], params[PARAMS_PER_BATCH:]
        self.client.log_batch(run.id, metrics, params, [RunTag(*item) for item in tags.items()])

    def _set_status(self, run: _Run, sheet: RunContents) -> None:
        self.client.update_run(run.id, sheet.status, sheet.name)
        if sheet.end_ms is not None:
            self.client.set_terminated(run.id, sheet.status, sheet.end_ms)

    def _tag_experiment(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            if self._experiment_tags.get(name) != value:
                self.client.set_experiment_tag(self.experiment, name, value)
                self._experiment_tags[name] = value

    def _write_note(self, record: StudyRecord, parent: str) -> None:
        """Writes the study's description, which links to runs, and so follows them."""
        if self._describe is None:
            return
        prefix = f"#/experiments/{self.experiment}/runs/"

        def link(number: int | None) -> str | None:
            run = self._runs.get(STUDY if number is None else str(number))
            return prefix + run.id if run else None

        views = {shows: view_link(self.experiment, name) for name, shows in VIEWS.items()}
        note = self._describe(record, link, views)
        if note != self._note:
            self.client.set_tag(parent, NOTE, note)
            self._tag_experiment({NOTE: note})
            self._note = note

    def _attach(self, parent: str, report: Path | None) -> None:
        if report is None or not report.exists():
            return
        state = report.stat()
        if self._report != (state.st_mtime_ns, state.st_size):
            self.client.log_artifact(parent, str(report))
            self._report = (state.st_mtime_ns, state.st_size)


def lacks_runs(directory: Path, record: StudyRecord) -> bool:
    """Tells whether the store of a study's directory has fewer runs that were written to the end than the record
    has, without MLflow: its writing was cut short, by a full disk for example. A store that is not there lacks
    none, as its user has moved it away."""
    if not database(directory).exists():
        return False
    query = (
        "select count(*) from runs join tags on tags.run_uuid = runs.run_uuid "
        "where tags.key = ? and runs.lifecycle_stage = 'active'"
    )
    try:
        with closing(sqlite3.connect(database(directory), timeout=LOCK_SECONDS)) as connection:
            ((written,),) = connection.execute(query, (REVISION,)).fetchall()
    except sqlite3.Error:  # whoever writes to it says what is wrong with it
        return True
    return bool(written < 1 + len(record.trials) + len(record.retrainings))


def _chosen(number: int, record: StudyRecord) -> tuple[object, ...]:
    """Returns what the choice of winners says of a trial; nothing before it was made."""
    if record.choice is None:
        return ()
    return (record.choice.of(number), *(winner for winner in record.choice.winners if winner.trial == number))


def _compared(baseline: TrialRecord) -> str:
    """Returns what the runs of other trials need of the baseline."""
    return repr((baseline.number, baseline.result.curve, baseline.result.validation))


def _identity(record: StudyRecord, since: object = None) -> str:
    """Returns what a study is known by among those of other people that have the same name: by default also when
    it was created."""
    since = since or record.created_at or _began(record)
    return _digest((record.name, record.seed, record.log.fingerprint, since))


def _began(record: StudyRecord) -> str:
    """Returns when the first trial began, by which earlier versions knew a study."""
    return min((trial.origin.started_at or "" for trial in record.trials), default="")


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
    fixed = {"status": sheet.status, "name": sheet.name}
    fixed |= {"params": _digest(sheet.params), "artifacts": _digest(sheet.artifacts)}
    return fixed | {"tags": ",".join(sorted(sheet.tags))} | metrics


def _readings(sheet: RunContents, key: str, count: int) -> str:
    return f"{count}:{_digest(sheet.series.get(key, ())[:count])}"


def _count(run: _Run, key: str) -> int:
    return int(run.logged.get(f"metric.{key}", "0:").partition(":")[0])


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
