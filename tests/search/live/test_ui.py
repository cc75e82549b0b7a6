"""`dhen-search ui` as a person has it: a store, the command, a browser."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium
from click.testing import CliRunner
from command_line import end_ui, read_until, start_ui
from tools import needs

from dashboards.names import trial_name
from dhen.errors import UserError
from search.mlflow.store import database
from search.read_study import read_study
from search.verbs.ui import command
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind

SEARCH = "document.querySelector('input[placeholder*=\"metric charts\"]')"
PLOTS = "[...document.querySelectorAll('.js-plotly-plot')]"
NE_HEAD = "document.querySelector('[data-testid=\"sort-header-best_ne\"]')"
RUNS = "[...document.querySelectorAll('a')].filter(a => a.closest('[row-index]') && /^#\\d+ /.test(a.textContent))"
ROW = "Number(a.closest('[row-index]').getAttribute('row-index'))"
NAMES = f"{RUNS}.map(a => [{ROW}, a.textContent]).sort((a, b) => a[0] - b[0]).map(pair => pair[1])"
"""As they stand on the page: the grid moves its rows without reordering the document."""


@pytest.fixture(scope="module")
def record(study: Path) -> StudyRecord:
    """A study that was really searched, with its MLflow as its driver left it."""
    return read_study(study)


@pytest.fixture(scope="module")
def address(study: Path) -> Iterator[str]:
    process = start_ui(study)
    said = read_until(process, "MLflow answers at")
    link = re.search(r"by NE: (\S+)", said)
    assert link is not None
    yield link[1]
    end_ui(process)
    port = int(re.search(r":(\d+)/", link[1])[1])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server outlived its command"


@needs("chromium")
def test_a_person_finds_the_study_sorts_by_ne_and_sees_a_curve(
    address: str, record: StudyRecord, tmp_path: Path
) -> None:
    done = [trial for trial in record.trials if trial.result.validation]
    by_ne = [trial.number for trial in sorted(done, key=lambda trial: trial.result.validation.ne)]
    best = record.trial(by_ne[0])
    name = f"#{best.number} {trial_name(best)}" + " baseline" * (best.kind is TrialKind.BASELINE)
    with Chromium(tmp_path / "profile") as browser:
        browser.open(address.partition("#")[0] + "#/experiments")
        browser.wait_for(f"[...document.querySelectorAll('a')].some(a => a.textContent === {record.name!r})")

        browser.open(address)
        browser.wait_for(f"{NAMES}.length >= {len(by_ne)}")
        assert numbers(browser)[: len(by_ne)] == by_ne
        browser.screenshot(tmp_path / "runs.png")
        browser.evaluate(f"{NE_HEAD}.click()")
        browser.wait_for(f"{NAMES}[0] !== {name!r}")
        assert numbers(browser)[: len(by_ne)] == by_ne[::-1]

        browser.evaluate(f"{RUNS}.find(a => a.textContent === {name!r}).click()")
        browser.wait_for("document.body.innerText.includes('About this run')")
        browser.open(browser.evaluate("location.href").partition("?")[0] + "/model-metrics")
        browser.wait_for(f"{SEARCH} !== null")
        browser.type(SEARCH, "^ne$")
        browser.wait_for(f"{PLOTS}.length === 1 && {PLOTS}[0].data[0].x.length > 1")
        curve = browser.evaluate(f"({{x: [...{PLOTS}[0].data[0].x], y: [...{PLOTS}[0].data[0].y]}})")
        assert curve["x"] == [point.examples for point in best.result.curve]
        assert curve["y"] == pytest.approx([point.validation.ne for point in best.result.curve])
        browser.screenshot(tmp_path / "curve.png")


def numbers(browser: Chromium) -> list[int]:
    return [int(name.split()[0].removeprefix("#")) for name in browser.evaluate(NAMES)]


def test_a_directory_without_a_store_or_with_a_damaged_one_is_the_users_mistake(tmp_path: Path) -> None:
    """Told before a server starts."""
    for directory, said in ((tmp_path / "none", "no such directory"), (tmp_path, "there is no mlflow.db")):
        with pytest.raises(UserError, match=said):
            CliRunner().invoke(command, [str(directory)], catch_exceptions=False)
    database(tmp_path).write_text("no database " * 50)
    with pytest.raises(UserError, match="move it away"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False)
