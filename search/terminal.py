"""What the terminal shows while work goes on: a live table of trials, progress of long steps.

With a terminal the table is redrawn in place; without one (a pipe, a CI log) each trial is a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dashboards.table import progress_line, trial_line, trial_table
from trials.events import Progress as TrainingProgress
from trials.record import Outcome, StudyRecord

REFRESH_SECONDS = 0.25
LINES_BESIDE_TABLE = 6


class StudyView:
    """Shows a study as it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn = 0.0
        self._said: set[int] = set()

    def __enter__(self) -> StudyView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, record: StudyRecord, progress: TrainingProgress | None) -> None:
        """Draws the study; cheap enough to be called at every event."""
        if self._live is None:
            self._say_ended(record)
        elif record.finished or time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._drawn = time.monotonic()
            rows = max(3, self._console.height - LINES_BESIDE_TABLE)
            table, line = trial_table(record, rows=rows), progress_line(record)
            self._live.update(Group(table, line, _training(progress)), refresh=True)

    def _say_ended(self, record: StudyRecord) -> None:
        """A line for each trial that has ended since the last call."""
        for trial in record.trials:
            if trial.outcome is not Outcome.RUNNING and trial.number not in self._said:
                self._said.add(trial.number)
                self._console.print(trial_line(record, trial.number), soft_wrap=True)
                self._console.print(progress_line(record), soft_wrap=True)


def _training(progress: TrainingProgress | None) -> Text:
    if progress is None:
        return Text("")
    share = progress.examples / progress.total_examples
    speed = progress.examples / max(progress.seconds, 1e-9)
    return Text(
        f"  training: {share:4.0%} of its passes at most, {speed:,.0f} examples a second", style="dim"
    )


@contextmanager
def step_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback (step, done, total or None) that shows each step as a bar, or as a line without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total, shown="")
                if not console.is_terminal:
                    console.print(f"{step} ...", soft_wrap=True)
            shown = f"{done:,}" + (f" of {total:,}" if total else "")
            bars.update(tasks[step], completed=done, total=total, shown=shown)

        yield show
