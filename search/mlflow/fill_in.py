"""The study in MLflow: one experiment, a run for the study, below it one for each trial, and below a trial's run
those of its retrainings.

MLflow follows the ledger. Each call of `StudyRuns.fill_in` logs what the record has and the runs lack: a run when
a trial has begun, values of metrics while it trains, and files and status once it has ended. What the runs hold is
read once and then kept in memory, so most calls log what has happened since the last. The first call of a command
fills in what was missed: by a command that was killed, by a server that was away, in a database that was deleted.

Values of metrics are only added: one that has changed is logged again, with a later time, and MLflow shows that.
No run is deleted but a second one of the same trial, and no tag that was not written here: a user's own stay.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.sentences.summary import study_note
from dhen.errors import UserError
from search.log_config import DEMO
from search.mlflow.contents import (
    KEY,
    STATUS,
    STUDY,
    VIEWS,
    MetricValue,
    RunContents,
    run_key,
    study_contents,
    study_status,
    trial_contents,
    trial_files,
    view_link,
    view_tags,
)
from search.mlflow.store import (
    LOCK_SECONDS,
    STUDY_ID,
    artifacts,
    check_store,
    database,
    is_database,
    local_path,
    mlflow_errors,
    open_client,
    server_of,
    store_uri,
    take_addresses_along,
)
from search.run_directory import BEST, REPORT
from trials.data.remote import is_url, shown_url
from trials.records.study_record import LogSummary, StudyRecord
from trials.records.trial_record import TrialRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Experiment, Run
    from rich.console import Console

    from search.config import StudyConfig

SOURCE, OURS = "mlflow.source.name", "dhen-search"
"""Tag of runs that were made here, and its value."""
WRITTEN = "mlflow.dhen.tags"
"""Tag of a run with the names of the tags that were written here, which alone may be deleted."""
PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"
"""MLflow's tags of the run above, and of a description in Markdown."""
NUMBERS = ("numeric", "label", "weight", "oracle")
"""Roles of columns that MLflow's dataset has as numbers; all others may hold text."""
MOST_SCHEMA_CHARACTERS = 1_000_000
"""MLflow refuses a longer schema; a log with so many columns has none there."""
SERVER_SECONDS, RETRY_SECONDS = 60.0, 20.0
"""Seconds after which a writing to a server ends with what it has come to; after which it is tried again."""
SAME = 1e-6
"""Relative difference up to which two values of a metric are one, computed by other ranks or in another order."""


@dataclass(slots=True)
class _Run:
    """What a run in MLflow holds."""

    id: str
    status: str
    tags: dict[str, str]
    params: set[str]
    """Names; values of params are final."""
    last: dict[str, MetricValue]
    """The last value of each metric, by step and then by time."""
    has_dataset: bool

    @classmethod
    def read(cls, run: Run) -> _Run:
        metrics = run.data.to_proto().metrics
        return cls(
            id=run.info.run_id,
            status=run.info.status,
            tags=dict(run.data.tags),
            params=set(run.data.params),
            last={each.key: MetricValue(each.step, each.value, each.timestamp) for each in metrics},
            has_dataset=bool(run.inputs and run.inputs.dataset_inputs),
        )


class StudyRuns:
    """The runs of one study in MLflow, written by one thread."""

    def __init__(self, directory: Path, config: StudyConfig, console: Console) -> None:
        self._directory, self._config, self._console = directory, config, console
        self._server = server_of(config)
        self._uri = self._server or store_uri(directory)
        self._study = ""
        """Name of the study whose runs were read; empty before, and after trouble."""
        self._client: MlflowClient
        self._experiment: Experiment
        self._runs: dict[str, _Run]
        self._report: tuple[int, int] | None = None
        self._trouble, self._again_at = "", 0.0

    def follow(self, record: StudyRecord, *, at_once: bool = False) -> bool:
        """Fills in, and tells whether MLflow has the whole record now. Trouble is printed once and ends nothing;
        soon after trouble nothing is tried, unless `at_once`."""
        if not at_once and time.monotonic() < self._again_at:
            return False
        try:
            self.fill_in(record)
        except UserError as error:
            self._say(error)
            return False
        if self._trouble:
            self._trouble = ""
            self._console.print("MLflow is up to date again", soft_wrap=True)
        return True

    def fill_in(self, record: StudyRecord) -> None:
        """Logs what the record has and MLflow's runs lack.

        Raises:
            UserError: if the store is damaged, locked or cannot be written, or the server does not answer, refuses
                or is slow. The next call fills in what is missing then.
        """
        if self._server and not record.trials:
            return  # what a study is known by on a server that others use too begins with its first trial
        deadline = time.monotonic() + SERVER_SECONDS
        try:
            with mlflow_errors(self._uri, own=self._server is None):
                if self._study != record.name:
                    self._read(record)
                contents = study_contents(record)
                begun = contents._replace(status="RUNNING", end_ms=None)
                study = self._runs.get(STUDY) or self._log(STUDY, begun, {}, record)
                for trial in (*record.trials, *record.retrainings):
                    if self._server and time.monotonic() > deadline:
                        raise UserError(
                            f"{self._server}: the MLflow tracking server is slow: what it did not take within "
                            f"{SERVER_SECONDS:.0f} s follows later."
                        )
                    parent = self._runs.get(str(trial.origin.of), study)
                    contents_of_trial = trial_contents(trial, record)
                    self._log(run_key(trial), contents_of_trial, {PARENT: parent.id}, record, trial)
                self._describe(record, study)
                self._log(STUDY, contents, {}, record)  # its status last of all: see `is_behind`
        except UserError:
            # a request whose answer was lost may have been done: the next call reads what is there
            self._study = ""
            raise

    def register_best(self, record: StudyRecord) -> None:
        """Registers the bundle of the best as a model, if the study is finished and its settings want that."""
        folder, experiment = self._directory / BEST, self._experiment
        if not (self._config.register_model and record.finished and folder.is_dir()):
            return
        from search.mlflow.model import register_bundle  # late: it needs torch

        try:
            with mlflow_errors(self._uri, own=self._server is None):
                register_bundle(self._client, folder, experiment.name, experiment.experiment_id)
        except UserError as error:
            self._say(error)

    def _say(self, error: UserError) -> None:
        self._again_at = time.monotonic() + RETRY_SECONDS
        if str(error) == self._trouble:
            return
        self._trouble = str(error)
        later = ""
        if self._server:
            later = (
                " The study goes on; MLflow is brought up to date when it answers again, at the latest by "
                f"the next `dhen-search run --out {self._directory}` or `dhen-search report {self._directory}`."
            )
        warning = f"warning: MLflow is behind: {error}{later}"
        self._console.print(warning, style="yellow", soft_wrap=True, markup=False)

    def _read(self, record: StudyRecord) -> None:
        """Finds or makes the study's experiment, and reads what its runs hold."""
        from mlflow.entities import ViewType

        if self._server is None:
            check_store(self._directory)
        client = self._client = open_client(self._uri)
        location = None
        if is_database(self._uri):  # of which MLflow would put the files into the working directory
            location = artifacts(self._directory).absolute().as_uri()
        began = min((trial.origin.started_at or "" for trial in record.trials), default="")
        known_by = (record.name, record.seed, record.log.fingerprint, record.created_at or began)
        identity = sha256(repr(known_by).encode()).hexdigest()[:16]
        experiment = named = client.get_experiment_by_name(record.name)
        if self._server:  # others use it too, so that names say nothing
            condition = f"tags.`{STUDY_ID}` = '{identity}'"
            experiment = next(iter(client.search_experiments(ViewType.ALL, 1, condition)), None)
        if experiment is None:
            name = record.name if named is None else f"{record.name} {identity[:6]}"
            made = client.create_experiment(name, location, {STUDY_ID: identity})
            experiment = client.get_experiment(made)
        if experiment.lifecycle_stage != "active":
            client.restore_experiment(experiment.experiment_id)
        self._runs = {}
        token: str | None = ""
        while token is not None:
            page = client.search_runs(
                [experiment.experiment_id],
                f"tags.`{SOURCE}` = '{OURS}'",
                max_results=1000,
                order_by=["attributes.start_time"],
                page_token=token or None,
            )
            token = page.token or None
            for run in map(_Run.read, page):
                kind, number = run.tags.get("kind"), run.tags.get("trial.number")
                key = STUDY if kind == STUDY else run.tags.get(KEY, number)
                if key in self._runs:  # the answer to its making was lost, and it was made once more
                    client.delete_run(run.id)
                elif key is not None:
                    self._runs[key] = run
        there = experiment.artifact_location
        if self._server and location and self._lie_at(location) and not self._lie_at(there):
            take_addresses_along(self._server, experiment.experiment_id, there, location)
        self._study, self._experiment = record.name, experiment

    def _lie_at(self, address: str) -> bool:
        """Tells whether files of the study's runs lie there: those of a copy's original do, and stay its own."""
        return any((local_path(address) / run.id).exists() for run in self._runs.values())

    def _log(
        self,
        key: str,
        contents: RunContents,
        tags: dict[str, str],
        record: StudyRecord,
        trial: TrialRecord | None = None,
    ) -> _Run:
        """Logs what one run lacks, its status last of all: what breaks off is missing next time."""
        from mlflow.entities import Metric, Param, RunTag

        client, experiment = self._client, self._experiment
        tags |= {**contents.tags, SOURCE: OURS, WRITTEN: ",".join(sorted(contents.tags))}
        run = self._runs.get(key)
        if run is None:
            made = client.create_run(experiment.experiment_id, contents.start_ms, tags, contents.name)
            run = self._runs[key] = _Run.read(made)
        if not run.has_dataset:
            client.log_inputs(run.id, [_dataset(record.log, self._config)])
            run.has_dataset = True
        gone = set(run.tags.get(WRITTEN, "").split(",")) & run.tags.keys() - tags.keys()
        for name in sorted(gone):
            client.delete_tag(run.id, name)
            del run.tags[name]
        metrics = [
            Metric(name, each.value, each.time_ms, each.step)
            for name, values in contents.series.items()
            for each in _missing(values, run.last.get(name))
        ]
        params = [Param(name, text) for name, text in contents.params.items() if name not in run.params]
        changed = [RunTag(name, text) for name, text in tags.items() if run.tags.get(name) != text]
        run.last |= {each.key: MetricValue(each.step, each.value, each.timestamp) for each in metrics}
        run.params |= contents.params.keys()
        run.tags |= tags
        # MLflow takes 1000 entries at once, of them 100 params and 100 tags
        while metrics or params or changed:
            client.log_batch(run.id, metrics[:800], params[:100], changed[:100])
            metrics, params, changed = metrics[800:], params[100:], changed[100:]
        if run.status != contents.status:
            if contents.end_ms is None:
                client.update_run(run.id, contents.status)
            else:
                for name, text in trial_files(trial, record) if trial is not None else ():
                    client.log_text(run.id, text, name)
                client.set_terminated(run.id, contents.status, contents.end_ms)
            run.status = contents.status
        return run

    def _describe(self, record: StudyRecord, study: _Run) -> None:
        """Writes what stands beside the runs: a description with links to them, views, and the report."""
        client, experiment = self._client, self._experiment
        number = experiment.experiment_id

        def link(trial: int | None) -> str | None:
            run = self._runs.get(STUDY if trial is None else str(trial))
            return f"#/experiments/{number}/runs/{run.id}" if run else None

        note = study_note(record, link, {shows: view_link(number, name) for name, shows in VIEWS.items()})
        if study.tags.get(NOTE) != note:
            client.set_tag(study.id, NOTE, note)
            study.tags[NOTE] = note
        wanted = view_tags() | {"mlflow.experimentKind": "custom_model_development", NOTE: note}
        for name, text in wanted.items():
            if experiment.tags.get(name) != text:
                client.set_experiment_tag(number, name, text)
                experiment.tags[name] = text
        report = self._directory / REPORT
        if report.exists():
            state = report.stat()
            if self._report != (state.st_mtime_ns, state.st_size):
                client.log_artifact(study.id, str(report))
                self._report = (state.st_mtime_ns, state.st_size)


def is_behind(directory: Path, record: StudyRecord) -> bool:
    """Tells, without MLflow, whether a run directory's own store lacks runs or their ends: its writing was cut
    short, by a full disk for example, or it was deleted."""
    if not database(directory).exists():
        return True
    query = (
        "select status, count(*) from runs join tags on tags.run_uuid = runs.run_uuid "
        "where tags.key = ? and tags.value = ? and runs.lifecycle_stage = 'active' group by status"
    )
    try:
        with closing(sqlite3.connect(database(directory), timeout=LOCK_SECONDS)) as connection:
            written = dict(connection.execute(query, (SOURCE, OURS)).fetchall())
    except sqlite3.Error:  # whoever writes to it says what is wrong with it
        return True
    wanted = Counter(STATUS[trial.result.outcome] for trial in (*record.trials, *record.retrainings))
    return written != wanted + Counter([study_status(record)])


def _missing(values: tuple[MetricValue, ...], last: MetricValue | None) -> Iterable[MetricValue]:
    """Returns what is to be logged of a metric after its last value: later steps; if that value has changed, as
    those against the baseline do with the baseline, all of them, at later times, by which MLflow goes."""
    if last is None:
        return values
    same_step = next((each.value for each in values if each.step == last.step), last.value)
    if math.isclose(same_step, last.value, rel_tol=SAME):
        return [each for each in values if each.step > last.step]
    return [each._replace(time_ms=max(each.time_ms, last.time_ms + 1)) for each in values]


def _dataset(log: LogSummary, config: StudyConfig) -> DatasetInput:
    """Returns the study's log as MLflow's dataset: name, fingerprint as digest, where it came from, columns."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    files = [shown_url(name) if is_url(name) else str(Path(name).absolute()) for name in config.data]
    if config.data == (DEMO,):
        files = [f"dhen-search demo: {config.demo.rows} rows, seed {config.demo.seed}"]
    columns = [
        {"type": "double" if role in NUMBERS else "string", "name": name, "required": True}
        for name, role in log.columns.items()
    ]
    schema = json.dumps({"mlflow_colspec": columns})
    profile: dict[str, float] = {f"rows.{split}": count for split, count in log.rows.items()}
    profile |= {f"base_rate.{split}": rate for split, rate in log.base_rate.items()}
    dataset = Dataset(
        name=log.name,
        digest=log.fingerprint[:36],
        source_type="local",
        source=json.dumps({"uri": files[0]} if len(files) == 1 else {"uris": files}),
        schema=schema if columns and len(schema) <= MOST_SCHEMA_CHARACTERS else None,
        profile=json.dumps({**profile, "tables": log.tables, "numeric": log.numeric}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
