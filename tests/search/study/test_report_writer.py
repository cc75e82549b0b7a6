"""The report and MLflow follow a study at a distance, and are whole in the end."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import study
from rich.console import Console

from search.config import StudyConfig
from search.mlflow.fill_in import is_behind
from search.mlflow.store import database
from search.study.report_writer import REPORT, ReportWriter
from trials.records.study_record import StudyRecord


def driver(record: StudyRecord, changes: int) -> Any:
    """What a report writer sees of a study that goes on."""
    ended = [trial.number for trial in record.trials]
    return SimpleNamespace(record=lambda: record, changes=changes, ended=ended, finished=False)


def report_writer(directory: Path) -> tuple[ReportWriter, io.StringIO]:
    said = io.StringIO()
    return ReportWriter(directory, StudyConfig(), Console(file=said, width=200)), said


def test_it_keeps_its_distance_and_ends_up_to_date(tmp_path: Path) -> None:
    part, whole = study(3, finished=False), study(5)
    follows, said = report_writer(tmp_path)
    follows(driver(part, 1))
    follows._settle()
    first = (tmp_path / REPORT).read_text()
    assert "3 of 3 candidates" in first
    for changes in range(2, 5):
        follows(driver(whole, changes))  # too soon
    assert (tmp_path / REPORT).read_text() == first
    follows.finish(whole)
    assert "finished, 5 of 5 candidates" in (tmp_path / REPORT).read_text()
    assert not is_behind(tmp_path, whole)
    assert said.getvalue() == ""


def test_it_follows_when_the_pause_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.study.report_writer.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("search.study.report_writer.PAUSE_RATIO", 0.0)
    follows, _ = report_writer(tmp_path)
    for changes, candidates in ((1, 2), (2, 4)):
        follows(driver(study(candidates), changes))
        follows._settle()
        assert f"{candidates} of {candidates} candidates" in (tmp_path / REPORT).read_text()
    written = (tmp_path / REPORT).stat().st_mtime_ns
    follows(driver(study(6), 2))  # nothing has changed, so nothing is written
    follows._settle()
    assert (tmp_path / REPORT).stat().st_mtime_ns == written


def test_mlflows_trouble_is_told_once_and_is_not_fatal(tmp_path: Path) -> None:
    database(tmp_path).write_bytes(b"no database at all" * 100)
    follows, said = report_writer(tmp_path)
    follows(driver(study(2), 1))
    follows.finish(study(3))
    assert said.getvalue().count("MLflow is behind") == 1
    assert "3 of 3 candidates" in (tmp_path / REPORT).read_text()


def test_a_report_that_cannot_be_written_ends_the_study(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    follows, _ = report_writer(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        follows.finish(study(2))
