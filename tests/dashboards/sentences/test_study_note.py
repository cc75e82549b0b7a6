"""A study's description in Markdown: findings, links, nothing of a user's that Markdown would take for its own."""

from __future__ import annotations

import re

from records import study

from dashboards.sentences.summary import MOST_CHARACTERS, study_note
from trials.records.study_record import StudyRecord


def test_the_front_is_a_table_with_links_of_which_the_best_end_is_kept() -> None:
    def note_of(record: StudyRecord) -> str:
        return study_note(record, lambda number: f"#/runs/{number}", {"runs by NE": "#/view"})

    record = study()
    note = note_of(record)
    assert note.startswith("**finished, 27 of 27 candidates**")
    linked = [int(number) for number in re.findall(r"^\| \[\\#\d+ .*?\]\(#/runs/(\d+)\)", note, re.MULTILINE)]
    assert sorted(linked) == sorted({*record.front, record.baseline})
    flops = [record.trial(number).job.flops for number in linked]
    assert flops == sorted(flops)
    assert f"{record.trial(record.best).result.validation.ne:.5f}" in note
    assert "(#/runs/None/artifacts/report.html)" in note
    assert "[runs by NE](#/view)" in note
    record = study(400)
    long = record.replace(front=tuple(trial.number for trial in record.candidates if trial.result.validation))
    note = note_of(long)
    assert len(note) <= MOST_CHARACTERS
    shown = re.findall(r"\(#/runs/(\d+)\)", note)
    assert shown
    dearest = max((long.trial(number) for number in long.front), key=lambda trial: trial.job.flops)
    assert str(dearest.number) in shown
