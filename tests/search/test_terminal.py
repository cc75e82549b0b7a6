"""What the terminal shows of a study that goes on: a table in place, or a line for each trial that has ended."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from records import study
from rich.console import Console

from search.terminal import StudyView
from trials.events import Progress
from trials.study_record import StudyRecord


def driver(record: StudyRecord, ended: list[int], **progress: Progress) -> Any:
    """What a view sees of a study that goes on."""
    told = {int(number.removeprefix("trial")): each for number, each in progress.items()}
    return SimpleNamespace(
        record=lambda: record, ended=ended, notices=[], progress=told, finished=record.finished
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
