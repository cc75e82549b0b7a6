"""A number that a training measures is added in two files, `Measured` and what measures it; all else passes it on.

A further number is added to `Measured`, in a copy of `trials/record.py` that fresh processes import, and goes the
whole way: event, record, ledger, MLflow, `status --json`. Whoever copies the numbers by hand loses it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trials.record import Measured

ROOT = Path(__file__).parents[2]
PACKAGES = ("dhen", "spaces", "trials", "search", "dashboards")
CONTRACT = Path("trials/record.py")
NUMBER, VALUE = "watts", 41.5
FIRST_FIELD = f"    {next(iter(Measured.model_fields))}: float | None = None\n"
MEASURES = {CONTRACT.as_posix(), "trials/training/loop.py"}
"""Where the numbers are defined, and what makes a `Measured` of numbers of its own."""
HAND_KEPT = 3
"""So many of the numbers by name in one file are taken for a list of them."""
WAY = """
import sys
from pathlib import Path
from random import Random

import trials.record
from records import judged, trial
from search.cli import main
from search.execution.reduce_events import reduce_event
from search.read_study import HEAD, read_study
from trials.events import EventReader, EventWriter, Trained
from search.mlflow.contents import trial_contents
from trials.record import Measured, Outcome, TrialKind
from trials.storage.database import sqlite_url
from trials.storage.ledger import Ledger, Setting

out, name, value = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
made_up = trial(0, Random(0), kind=TrialKind.BASELINE)
(out / "study.yaml").write_text("{}")
ended = Trained(best=made_up.result.validation, measured=Measured(**{name: value}))
with EventWriter(out / "events.jsonl") as write:
    write(ended)
(event,) = EventReader(out / "events.jsonl")()
begun = made_up.with_result(outcome=Outcome.RUNNING, measured=Measured(), seconds=None)
record = reduce_event(begun, event).with_result(seconds=1.0)
ledger = Ledger(sqlite_url(out / "study.db"), out.name)
cluster = {"name": "small", "hosts": 1, "gpus_per_host": 1, "hbm": 1}
ledger.settle(Setting(directory="", log="l", features={}, seed=0, version=2, cluster=cluster))
ledger.change_facts(lambda _: {HEAD: judged([]).model_dump(mode="json")})
ledger.save(record)
of_ledger, = ledger.trials()
ledger.save_retraining(record.replace(kind=TrialKind.RETRAINING).with_origin(of=0))
of_retrainings, = ledger.retrainings()
ledger.close()
study = read_study(out)
(reading,) = trial_contents(study.trials[0], study).series["measured/" + name]
print(trials.record.__file__)
print(getattr(of_ledger.result.measured, name), getattr(of_retrainings.result.measured, name), reading.value)
print(getattr(record.result.taken_over().measured, name))
print(study.trials[0].result.outcome)
main(["status", str(out), "--json"])
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a fresh process says of a number that its `Measured` has besides."""
    folder = tmp_path_factory.mktemp("further")
    code, study = folder / "code", folder / "study"
    (code / CONTRACT.parent).mkdir(parents=True)
    study.mkdir()
    for package in PACKAGES:
        if package != CONTRACT.parent.name:
            (code / package).symlink_to(ROOT / package)
    for entry in (ROOT / CONTRACT.parent).iterdir():
        if entry.name not in (CONTRACT.name, "__pycache__"):
            (code / CONTRACT.parent / entry.name).symlink_to(entry)
    text = (ROOT / CONTRACT).read_text()
    assert text.count(FIRST_FIELD) == 1
    (code / CONTRACT).write_text(
        text.replace(FIRST_FIELD, f"    {NUMBER}: float | None = None\n{FIRST_FIELD}")
    )
    done = subprocess.run(
        [sys.executable, "-c", WAY, str(study), NUMBER, str(VALUE)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (code, ROOT / "tests")))},
        cwd=code,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    where, *lines = done.stdout.splitlines()
    assert Path(where) == code / CONTRACT
    return lines


def test_a_further_number_reaches_the_ledger_and_mlflow_from_the_event_alone(said: list[str]) -> None:
    assert said[0] == " ".join([str(VALUE)] * 3)


def test_a_further_number_belongs_to_a_result_that_is_taken_over(said: list[str]) -> None:
    assert said[1] == str(VALUE)


def test_status_says_a_further_number_as_json(said: list[str]) -> None:
    (trial,) = json.loads("\n".join(said[3:]))["trials"]
    assert trial["result"]["measured"][NUMBER] == VALUE


def _names(path: Path) -> set[str]:
    """Of the measured numbers, those that a file has as an attribute, a keyword or a string; few count as none."""
    text, found = path.read_text(), set[str]()
    if sum(name in text for name in Measured.model_fields) < HAND_KEPT:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & set(Measured.model_fields)


def test_no_file_but_what_measures_lists_the_measured_numbers() -> None:
    """A display of one or two of them is none."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lists = {path.relative_to(ROOT).as_posix() for path in files if len(_names(path)) >= HAND_KEPT}
    assert lists <= MEASURES


@pytest.mark.parametrize(
    "text",
    [
        "row = dict(a=m.step_ms, b=m.train_seconds, c=m.peak_memory_bytes)",
        "kept = m.replace(step_ms=1.0, train_seconds=2.0, evaluate_seconds=3.0)",
        "NAMES = ('step_ms', 'train_seconds', 'evaluate_seconds')",
    ],
)
def test_a_list_kept_by_hand_is_recognised(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.py").write_text(text)
    assert len(_names(tmp_path / "file.py")) >= HAND_KEPT
