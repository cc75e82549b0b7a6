"""What the terminal shows of a study that goes on: a table in place, or a line for each trial that has ended."""

from __future__ import annotations

import io
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from records import study, trial
from rich.console import Console

from search.terminal import StudyView, step_progress
from trials.records.events import Progress
from trials.records.study_record import StageName, StudyRecord, StudyStage
from trials.records.trial_record import TrialKind


def driver(record: StudyRecord, ended: list[int], **progress: Progress) -> Any:
    """What a view sees of a study that goes on."""
    told = {int(number.removeprefix("trial")): each for number, each in progress.items()}
    return SimpleNamespace(
        record=lambda: record,
        head=record,
        ended=ended,
        notices=[],
        progress=told,
        retrainings={trial.number: trial for trial in record.retrainings},
        retraining_progress={},
        finished=record.finished,
    )


def shown(*studies: Any, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=140, height=40, force_terminal=terminal, color_system=None)
    with StudyView(console) as view:
        for each in studies:
            view(each)
    return console.file.getvalue()


def test_all_that_trains_is_shown_with_how_far_it_is() -> None:
    half = Progress(examples=500, total_examples=1000, seconds=2.0)
    tenth = Progress(examples=100, total_examples=1000, seconds=0.5)
    text = shown(driver(study(6, finished=False), [], trial9=half, trial8=tenth), terminal=True)
    assert "trial 8 trains: 10% of its passes at most, 200 examples per second" in text
    assert "trial 9 trains: 50% of its passes at most, 250 examples per second" in text
    assert text.index("trial 8 trains") < text.index("trial 9 trains")


def test_without_a_terminal_each_trial_that_ends_is_a_line() -> None:
    part, whole = study(6, finished=False), study(6)
    text = shown(
        driver(part, []), driver(part, [0, 1]), driver(part, [0, 1]), driver(whole, [0, 1, 3]), terminal=False
    )
    lines = [line for line in text.splitlines() if " candidates, " not in line]
    assert [line.split()[1] for line in lines] == ["0", "1", "3"]
    assert lines[0].startswith("baseline 0 completed")


def in_confirmation(ended: int) -> StudyRecord:
    """A study that runs, of whose four retrainings so many have ended."""
    again = [
        trial(number, Random(number), kind=TrialKind.BASELINE).replace(kind=TrialKind.RETRAINING)
        for number in range(ended)
    ]
    stage = StudyStage(name=StageName.CONFIRMATION, total=4, began_seconds=100.0)
    record = study(6).replace(finished=False, stage=stage, elapsed_seconds=100.0 + 20.0 * ended)
    return record.replace(retrainings=tuple(one.with_origin(of=3) for one in again))


def test_without_a_terminal_stages_and_retrainings_say_how_far_they_are() -> None:
    text = shown(*(driver(in_confirmation(ended), []) for ended in (0, 1, 1, 3)), terminal=False)
    assert [line.partition(";")[0] for line in text.splitlines()] == [
        "confirmation: 0/4 retrainings",
        "confirmation: 1/4 retrainings, about 1 min 00 s left",
        "confirmation: 3/4 retrainings, about 20 s left",
    ]


def steps(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    """What is shown of two steps, of which the first takes 100 seconds."""
    now = [0.0]
    monkeypatch.setattr("search.terminal.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=140, force_terminal=terminal, color_system=None)
    with step_progress(console) as progress:
        for second in range(0, 101, 10):
            now[0] = float(second)
            progress("reading", second * 1000, 100_000)
        progress("writing", 0, None)
        now[0] = 102.0
        progress("writing", 500, None)
    return console.file.getvalue()


def test_steps_say_their_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, terminal=False).splitlines() == [
        "reading ...",
        "reading: 30,000 of 100,000 rows, 1.00 k rows/s, about 1 min 10 s left, after 30 s",
        "reading: 60,000 of 100,000 rows, 1.00 k rows/s, about 40 s left, after 1 min 00 s",
        "reading: 90,000 of 100,000 rows, 1.00 k rows/s, about 10 s left, after 1 min 30 s",
        "reading: 100,000 of 100,000 rows, 1.00 k rows/s, after 1 min 40 s",
        "writing ...",
        "writing: 500 rows, 250 rows/s, after 2.0 s",
    ]
    assert "100,000 of 100,000 rows, 1.00 k rows/s" in steps(monkeypatch, terminal=True)
