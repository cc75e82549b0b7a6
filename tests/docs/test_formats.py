"""The page of formats names all that is on disk and in `--json`: events, tables, files, fields."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from records import spaced_study

from dhen.model import named_model
from dhen.schema import FeatureSchema, Table
from search import run_directory
from search.bundles import bundle, increments, pt2
from search.bundles.online import CHECKPOINTS
from search.execution.trainer import SERVING
from search.mlflow.store import artifacts, database
from search.serving import app
from search.study.optuna_mirror import attributes_of, study_attributes
from search.verbs.online import FIGURE
from search.verbs.plan import as_data
from trials.cluster.this_machine import load_cluster
from trials.data.prepared_log import MANIFEST
from trials.planner.plan import plan
from trials.records.events import EVENTS, RENDEZVOUS, WEIGHTS, Event
from trials.records.findings import Choice, JudgedTrial, Winner
from trials.records.job import TrainingConfig
from trials.records.serving_limits import ForwardTime, ServingConfig
from trials.records.study_record import ClusterSummary, StudyRecord
from trials.records.task import Task
from trials.records.trial_record import Attempt, CurvePoint, Measurements, Metrics, TrialRecord
from trials.runtime.hosts.hosts import MARK
from trials.store.schema import METADATA

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text()
KINDS = typing.get_args(typing.get_args(Event)[0])


def row(name: str) -> str:
    """The row of a table of the page that begins with this name."""
    found = re.search(rf"^\| (?:\S+ )?`{re.escape(name)}`.*$", PAGE, re.MULTILINE)
    assert found, f"docs/formats.md has no row for {name}"
    return found[0]


def section(heading: str) -> str:
    """What stands under a heading."""
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def missing(names: typing.Iterable[str], text: str) -> list[str]:
    return [name for name in names if f"`{name}`" not in text]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_there_with_its_fields(kind: typing.Any) -> None:
    fields = dict(kind.model_fields)
    name = fields.pop("event").default
    assert missing(fields, row(name)) == []


@pytest.mark.parametrize("table", METADATA.sorted_tables, ids=lambda table: table.name)
def test_every_table_of_the_ledger_is_there_with_its_columns(table: typing.Any) -> None:
    assert missing((column.name for column in table.columns), row(table.name)) == []


def test_what_stands_on_disk_and_is_answered_is_there() -> None:
    of_a_bundle = (bundle.INFO, f"{bundle.ENCODING}/", WEIGHTS, bundle.CHECK, bundle.MANIFEST)
    of_a_bundle += (
        f"{increments.INCREMENTS}/",
        increments.INFO,
        increments.CHANGES,
        f"{CHECKPOINTS}/",
        FIGURE,
    )
    assert missing(of_a_bundle, section("A bundle")) == []
    assert missing({"int8_tables", *bundle.Int8Cost.model_fields}, row(bundle.INFO)) == []
    files = {pt2.MODEL, pt2.INPUTS, f"{bundle.ENCODING}/", pt2.EXAMPLES, bundle.MANIFEST, pt2.PROBABILITY}
    fields = {*pt2.PackageInfo.model_fields, *pt2.PackageInput.model_fields, *pt2.InputColumn.model_fields}
    assert missing(files | fields, section("A package")) == []
    answered = (app.VERSION_HEADER, app.BAD_REQUEST, app.INTERNAL_ERROR)
    assert missing(answered, section("What `serve` answers")) == []
    arrays = ("labels", "categorical", "numeric", "bag0_ids", "bag0_offsets", "weight", "oracle", "timestamp")
    of_a_cache = (MANIFEST, *(f"{name}.npy" for name in arrays))
    assert missing(of_a_cache, section("The cache that `prepare` writes")) == []


def test_every_file_of_a_run_directory_is_there() -> None:
    names = ("STUDY_FILE", "STUDY_DB", "LOCK_FILE", "DRIVER_LOG", "REPORT")
    files = [getattr(run_directory, name) for name in names]
    folders = (run_directory.BEST, run_directory.CHECKPOINTS, artifacts(Path()).name, SERVING)
    files += [f"{folder}/" for folder in folders]
    files += [EVENTS, RENDEZVOUS, WEIGHTS, database(Path()).name, MARK]
    assert missing(files, section("A run directory")) == []


@pytest.mark.parametrize("more", [{}, {"score_split": "SPLIT"}, {"serving": ServingConfig()}], ids=str)
def test_every_log_of_a_rank_is_there(more: dict[str, typing.Any]) -> None:
    task = Task.model_construct(attempt=0, **more)
    name = task.logs(Path()).path(0).name.replace("attempt0", "attempt{a}")
    page = section("A run directory")
    assert f"`{name}`" in page or f"`{name.replace('rank0', 'rank{r}')}`" in page


@pytest.mark.parametrize(
    ("part", "heading"),
    [
        *((part, "Events") for part in (CurvePoint, Measurements, Metrics, ForwardTime)),
        *((part, "`status --json`") for part in (StudyRecord, ClusterSummary, TrialRecord)),
        *((part, "`status --json`") for part in (Choice, Winner, JudgedTrial)),
    ],
)
def test_a_section_has_the_fields_of_its_values(part: typing.Any, heading: str) -> None:
    assert missing(part.model_fields, section(heading)) == []


def test_the_parts_of_a_trial_and_its_attempts_have_their_fields() -> None:
    for field in ("origin", "job", "plan", "result"):
        part: typing.Any = TrialRecord.model_fields[field].annotation
        assert missing(part.model_fields, row(field)) == [], field
    assert missing(Attempt.model_fields, row("dhen_attempt")) == []


def test_plan_as_json_has_these_fields() -> None:
    schema = FeatureSchema(tables=(Table(name="site", rows=100),), numeric=("price",))
    training = TrainingConfig(batch_size=64, precision="fp32")
    found = as_data(plan(named_model("dlrm"), schema, training, load_cluster("h100")))
    text = section("`plan --json`")
    assert missing(type(found).model_fields, text) == []
    assert missing(type(found.strategies[0]).model_fields, text) == []


def test_what_stands_in_optuna_is_there() -> None:
    text = section("A study in Optuna's storage")
    record = spaced_study(4)
    attributes = {name for trial in record.candidates for name in attributes_of(trial)}
    assert missing(attributes, text) == []
    assert missing(study_attributes(record, []), text) == []
