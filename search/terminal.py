"""What the terminal shows while work goes on: a live table of trials, progress of long steps.

With a terminal the table is redrawn in place; without one (a pipe, a CI log) each trial is a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from dashboards.names import duration, si
from dashboards.rows import LOG_EXPLANATION, log_table
from dashboards.sentences.summary import ended
from dashboards.terminal.tables import plain_table, progress_line, trial_line, trial_table
from search.cli import INTERRUPTED, TerminationSignal
from search.study_state import StudyState
from trials.data.remote import COPYING
from trials.records.events import Progress
from trials.records.study_record import ColumnFinding, StudyRecord, StudyStage
from trials.records.trial_record import TrialKind, TrialRecord

REFRESH_SECONDS = 0.25
TABLE_WIDTH = 140
"""Width of tables if there is no terminal."""
LINES_BESIDE_TABLE = 5


class StudyView:
    """An observer of a study, which shows it as it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn = 0.0
        self._said = self._noticed = self._retrained = 0
        self._stage: StudyStage | None = None

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
            # a line for each trial that has ended since the last call, and how far the study is: after these,
            # after retrainings, and where a stage begins
            if self._said == len(study.ended) and self._stage == study.head.stage:
                before, self._retrained = self._retrained, len(ended(study.retrainings.values()))
                if self._retrained <= before:
                    return
            self._stage, record = study.head.stage, study.record()
            for number in study.ended[self._said :]:
                self._console.print(trial_line(record, number), soft_wrap=True)
            self._said = len(study.ended)
            if not study.finished:
                self._console.print(progress_line(record, shares(study.progress)), soft_wrap=True)
        elif study.finished or time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._drawn = time.monotonic()
            record = study.record()
            training = progress_lines(record, study.progress, study.retraining_progress)
            rows = max(3, self._console.height - LINES_BESIDE_TABLE - len(training))
            table = trial_table(record, rows=rows)
            self._live.update(Group(table, *training), refresh=True)


def print_table(table: Table) -> None:
    """Prints a table on stdout, as wide as the terminal, or wide enough if there is none."""
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Prints a text as it is, however long: nothing in it is markup, or a number to be coloured."""
    console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)


def print_columns(console: Console, findings: Sequence[ColumnFinding]) -> None:
    """Prints the table of a log's columns; nothing if a person wrote the schema."""
    if findings:
        table = plain_table(*log_table(findings))
        wide = console if console.is_terminal else Console(file=console.file, width=TABLE_WIDTH)
        wide.print(table)
        print_line(console, LOG_EXPLANATION, "dim")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Prints what was noticed and decided while a log was prepared, such as how it is split."""
    for note in notes:
        print_line(console, f"note: {note}")


def progress_lines(
    record: StudyRecord, trials: Mapping[int, Progress], retrainings: Mapping[int, Progress]
) -> list[Text]:
    """How far a study is, then a line for each training that goes on, in order of their numbers.

    Args:
        record: the study.
        trials: what running trials have reported last, by number.
        retrainings: the same of retrainings.
    """
    lines = [progress_line(record, shares(retrainings or trials))]
    lines += [training_line(record.trial(number), one) for number, one in sorted(trials.items())]
    lines += [training_line(record.retraining(number), one) for number, one in sorted(retrainings.items())]
    return lines


def shares(progress: Mapping[int, Progress]) -> dict[int, float]:
    """The part of each training that is done, by its number."""
    return {number: one.examples / one.total_examples for number, one in progress.items()}


def training_line(trial: TrialRecord, progress: Progress) -> Text:
    """How far a trial's training, or that of a retraining, is, how fast it is, and how long it still takes."""
    again = f"retraining of trial {trial.origin.of} from seed {trial.job.seed}"
    name = again if trial.kind is TrialKind.RETRAINING else f"trial {trial.number}"
    share = progress.examples / progress.total_examples
    speed = progress.examples / max(progress.seconds, 1e-9)
    left = f", {duration(progress.seconds * (1 / share - 1))} left at most" if share > 0 else ""
    said = f"  {name} trains: {share:.0%} of its passes at most, {speed:,.0f} examples per second{left}"
    return Text(said, style="dim")


@contextmanager
def resumable(console: Console, directory: Path) -> Iterator[None]:
    """A context in which Ctrl-C or SIGTERM ends this process (exit code 130) and prints that the same command goes
    on."""
    try:
        yield
    except KeyboardInterrupt as error:
        by_signal = " by SIGTERM" if isinstance(error, TerminationSignal) else ""
        console.print(f"\ninterrupted{by_signal}; the same command goes on ({directory}).", soft_wrap=True)
        sys.exit(INTERRUPTED)


@contextmanager
def step_progress(console: Console, unit: str = "rows") -> Iterator[StepProgress]:
    """A callback (step, done, total or None) that shows each step as a bar, with its rate and the time left.

    Without a terminal a step is a line when it begins, one more when it has ended, and one every half a minute.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        steps: dict[str, _Step] = {}
        tasks: dict[str, TaskID] = {}

        def say(step: _Step) -> None:
            if not console.is_terminal:
                console.print(step.in_words(), soft_wrap=True, highlight=False)

        def show(name: str, done: int, total: int | None) -> None:
            if name not in steps:
                for last in list(steps.values())[-1:]:
                    say(last)
                steps[name], tasks[name] = (
                    _Step(name, UNITS.get(name, unit)),
                    bars.add_task(name, total=total, shown=""),
                )
                if not console.is_terminal:
                    console.print(f"{name} ...", soft_wrap=True)
            step = steps[name]
            step.done, step.total = done, total
            bars.update(tasks[name], completed=done, total=total, shown=step.shown)
            if step.is_long_since_said():
                say(step)

        yield show
        for last in list(steps.values())[-1:]:
            say(last)


UNITS = {COPYING: "MiB"}
"""What a step counts if it is not what the others count."""
SAID_EVERY_SECONDS = 30.0
"""How often a long step says how far it is if there is no terminal."""
LEAST_SECONDS = 1.0
"""Seconds of a step before its pace says anything."""
StepProgress = Callable[[str, int, int | None], None]


class _Step:
    """A step of something long: how far it is, how fast, how long it still takes."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.done = 0
        self.total: int | None = None
        self._began = self._said = time.monotonic()

    @property
    def shown(self) -> str:
        """`1,200 of 20,000 rows, 12.3 k rows/s, 2.1 s left`."""
        seconds = time.monotonic() - self._began
        clauses = [f"{self.done:,}" + (f" of {self.total:,}" if self.total else "") + f" {self.unit}"]
        if seconds >= LEAST_SECONDS and self.done:
            clauses.append(f"{si(self.done / seconds)} {self.unit}/s".replace("  ", " "))
            if self.total and self.done < self.total:
                clauses.append(f"about {duration(seconds * (self.total / self.done - 1))} left")
        return ", ".join(clauses)

    def in_words(self) -> str:
        """A line for logs."""
        return f"{self.name}: {self.shown}, after {duration(time.monotonic() - self._began)}"

    def is_long_since_said(self) -> bool:
        """Whether it is time to say how far the step is; a yes counts as said."""
        if time.monotonic() - self._said < SAID_EVERY_SECONDS:
            return False
        self._said = time.monotonic()
        return True
