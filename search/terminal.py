"""What the terminal shows while work goes on: a live table of trials, progress of long steps.

With a terminal the table is redrawn in place; without one (a pipe, a CI log) each trial is a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from dashboards.terminal.tables import progress_line, trial_line, trial_table
from search.cli import INTERRUPTED, Terminated
from search.study_state import StudyState
from trials.events import Progress

REFRESH_SECONDS = 0.25
TABLE_WIDTH = 140
"""Width of tables where there is no terminal."""
LINES_BESIDE_TABLE = 5


class StudyView:
    """An observer of a study, which shows it as it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn = 0.0
        self._said = self._noticed = 0

    def __enter__(self) -> StudyView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, study: StudyState) -> None:
        """Draws the study, some times per second at most, or prints which trials have ended."""
        for notice in study.notices[self._noticed :]:
            self._console.print(notice, style="yellow", soft_wrap=True, markup=False)
        self._noticed = len(study.notices)
        if self._live is None:
            self._say_ended(study)
        elif study.finished or time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._drawn = time.monotonic()
            record, training = study.record(), progress_lines(study.progress)
            rows = max(3, self._console.height - LINES_BESIDE_TABLE - len(training))
            table = trial_table(record, rows=rows)
            self._live.update(Group(table, progress_line(record), *training), refresh=True)

    def _say_ended(self, study: StudyState) -> None:
        """Prints a line for each trial that has ended since the last call."""
        if self._said == len(study.ended):
            return
        record = study.record()
        for number in study.ended[self._said :]:
            self._console.print(trial_line(record, number), soft_wrap=True)
            self._console.print(progress_line(record), soft_wrap=True)
        self._said = len(study.ended)


def print_table(table: Table) -> None:
    """Prints a table on stdout, as wide as the terminal, or wide enough where there is none."""
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Prints what was noticed and decided while a log was prepared, such as how it is split."""
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)


def progress_lines(progress: Mapping[int, Progress]) -> list[Text]:
    """Lines that say how far each training is, in order of the trials' numbers."""
    return [Text(_training(number, training), style="dim") for number, training in sorted(progress.items())]


def _training(number: int, progress: Progress) -> str:
    share = progress.examples / progress.total_examples
    speed = progress.examples / max(progress.seconds, 1e-9)
    return f"  trial {number} trains: {share:.0%} of its passes at most, {speed:,.0f} examples per second"


@contextmanager
def resumable(console: Console, directory: Path) -> Iterator[None]:
    """A context in which Ctrl-C or SIGTERM ends this process (exit code 130) and prints that the same command goes
    on."""
    try:
        yield
    except KeyboardInterrupt as error:
        by_signal = " by SIGTERM" if isinstance(error, Terminated) else ""
        console.print(f"\ninterrupted{by_signal}; the same command goes on ({directory}).", soft_wrap=True)
        sys.exit(INTERRUPTED)


@contextmanager
def step_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback (step, done, total or None) that shows each step as a bar, or as a line without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total, shown="")
                if not console.is_terminal:
                    console.print(f"{step} ...", soft_wrap=True)
            shown = f"{done:,}" + (f" of {total:,}" if total else "")
            bars.update(tasks[step], completed=done, total=total, shown=shown)

        yield show
