"""Predicted against measured, by hand-made attempts."""

from __future__ import annotations

from random import Random

import pytest
from records import judged, trial

from dashboards.plans import ALL, accuracy, accuracy_table
from dashboards.report.page import render
from dashboards.sentences.summary import sentences
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Attempt, Outcome, TrialKind


def attempt(strategy: str, predicted: int | None, measured: int | None, **changes: object) -> Attempt:
    known = {"strategy": strategy, "outcome": Outcome.COMPLETED}
    return Attempt(**known | {"predicted_bytes": predicted, "measured_bytes": measured} | changes)


def tried(*attempts: Attempt) -> StudyRecord:
    """A study of a baseline and a candidate that has these behind it."""
    baseline, own = trial(0, Random(0), kind=TrialKind.BASELINE), trial(1, Random(1))
    return judged([baseline, own.replace(attempts=attempts)])


SHORT = attempt("dp", 100, None, outcome=Outcome.OUT_OF_MEMORY, needed_bytes=150, limit_bytes=120)
RECORD = tried(
    SHORT,
    attempt("zero1", 100, 102),
    attempt("zero1", 200, 180, predicted_step_seconds=0.1, measured_step_seconds=0.15),
    attempt("fsdp", 100, 104, predicted_step_seconds=0.2, measured_step_seconds=0.1),
    attempt("fsdp", 100, None),
    attempt("fsdp", None, 100),
)


def test_a_row_for_each_technique_and_one_for_all() -> None:
    rows = {row.technique: row for row in accuracy(RECORD)}
    assert list(rows) == ["fsdp", "zero1", "dp", ALL]
    assert [rows[name].attempts for name in rows] == [3, 2, 1, 6]
    assert [rows[name].out_of_memory for name in rows] == [0, 0, 1, 1]
    assert [rows[name].peak.count for name in rows] == [1, 2, 0, 3]
    assert rows["zero1"].peak.median == pytest.approx(6.0)
    assert rows["zero1"].peak.worst == pytest.approx(-10.0)
    assert rows[ALL].peak.median == pytest.approx(4.0)
    assert (rows[ALL].step.count, rows[ALL].step.median) == (2, pytest.approx(50.0))
    assert (rows["dp"].peak.median, rows["dp"].step.worst) == (None, None)
    assert accuracy(judged([])) == ()
    names = ("dp+host_tables=3629KiB", "dp+host_tables=3683KiB", "dp+ssd_tables=3683KiB")
    found = accuracy(tried(*(attempt(name, 100, 100) for name in names)))
    counts = [(row.technique, row.attempts) for row in found]
    assert counts == [("dp+host_tables", 2), ("dp+ssd_tables", 1), (ALL, 3)], "without the sizes of caches"


def test_the_page_and_the_summary_say_the_same() -> None:
    page, said = render(RECORD), " ".join(sentences(RECORD))
    table = page.split("Predicted against measured</h3>")[1].split("</table>")[0]
    columns, rows, _ = accuracy_table(RECORD)
    for row in rows:
        assert f">{row[0]}</td>" in table
    assert all(column in table for column in columns)
    assert '4.0 %</td><td class="number">-10.0 %' in table
    assert "Measured peaks are off from predicted ones by 4.0 % (median of 3), -10.0 % at worst." in said
    assert "step times are off from predicted ones by 50.0 % (median of 2), " in said
    assert "1 training ran out of memory, and was tried again" in said
    assert "Predicted against measured" not in render(judged([]))
