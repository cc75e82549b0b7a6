"""`report`: one study, two studies, a study with little or lost."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from command_line import Run, run_process

from search.bundles.export import lost_weights
from search.mlflow.fill_in import is_behind
from search.mlflow.store import database
from search.read_study import read_study
from trials.records.events import WEIGHTS


def test_the_report_is_opened_in_the_browser(
    environment: dict[str, str], study: Path, tmp_path: Path
) -> None:
    """The browser is a program of ours that notes what it was asked to open."""
    seen, browser, out = tmp_path / "seen", tmp_path / "browser", tmp_path / "my report.html"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {seen}\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    words = ("report", study, "--out", out, "--open")
    done = run_process(words, {**environment, "BROWSER": str(browser)}, None)
    assert done.returncode == 0, done.stderr
    assert seen.read_text().strip() == out.as_uri()
    nowhere = {name: value for name, value in environment.items() if name != "DISPLAY"}
    done = run_process(words, {**nowhere, "BROWSER": "/nowhere", "PATH": "/nowhere"}, None)
    assert done.returncode == 0, done.stderr
    assert "no browser could be started here; open file://" in done.stderr


def test_two_studies_are_compared(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / study.name
    shutil.copytree(study, other)
    out = tmp_path / "two.html"
    said = dhen_search("report", study, "--compare", other, "--out", out).stdout
    assert said == f"report: {out}\n"
    page = out.read_text()
    assert "The best of each" in page
    assert "What cannot be compared" not in page
    assert str(other) in page
    message = dhen_search("report", study, "--compare", tmp_path / "nothing", code=2).stderr
    assert "no study here" in message


def test_a_study_that_has_not_begun_has_a_page_that_says_so(
    dhen_search: Run, study: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(study / "study.yaml", empty)
    dhen_search("report", empty)
    page = (empty / "report.html").read_text()
    assert "No trial has started yet" in page
    assert f"dhen-search run --out {empty}" in page
    assert not (empty / "study.db").exists()
    assert "has not started a trial yet" in dhen_search("status", empty, code=2).stderr


def test_weights_that_are_gone_are_said(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    copy = tmp_path / study.name
    shutil.copytree(study, copy)
    assert lost_weights(read_study(copy)) == ()
    for file in (copy / "trials").rglob(WEIGHTS):
        file.unlink()
    record = read_study(copy)
    (said,) = lost_weights(record)
    numbers = ", ".join(str(number) for number in sorted(record.exportable))
    assert f"{numbers} are gone from {copy}" in said
    dhen_search("report", copy)
    assert "are gone from" in (copy / "report.html").read_text()
    shutil.rmtree(copy / "artifacts")
    dhen_search("report", copy)


def test_a_store_of_mlflow_that_is_behind_is_filled_in(
    study: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """As after a full disk, when the last run's writing was cut short; a deleted store is made anew."""
    study = Path(shutil.copytree(study, tmp_path / "study"))

    def report() -> str:  # in a process of its own: MLflow holds on to the file of a store that was deleted
        done = run_process(("report", study), environment, None)
        assert done.returncode == 0, done.stderr
        return done.stdout

    record, store = read_study(study), database(study)
    assert not is_behind(study, record)
    with closing(sqlite3.connect(store)) as connection, connection:
        (latest,) = connection.execute(
            "select run_uuid from runs order by start_time desc limit 1"
        ).fetchone()
        for table in ("metrics", "latest_metrics"):
            connection.execute(f"delete from {table} where run_uuid = ?", (latest,))
        connection.execute("update runs set status = 'RUNNING' where run_uuid = ?", (latest,))
    for goes_on in (True, False):
        assert is_behind(study, record)
        assert f"MLflow: {store} is up to date" in report()
        assert not is_behind(study, record)
        with closing(sqlite3.connect(store)) as connection:
            lacking = "select count(*) from runs where run_uuid not in (select run_uuid from latest_metrics)"
            assert connection.execute(lacking).fetchone() == (0,)
        if goes_on:
            store.unlink()
    assert "MLflow" not in report()
    store.write_bytes(b"no database" * 100)
    assert is_behind(study, record)
