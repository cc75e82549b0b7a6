"""What the terminal shows while winners are retrained: a line for each that has ended, how many of how many."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dashboards.names import decimals, duration
from dashboards.sentences.winners import retrained_line
from search.dataset import OnProgress
from search.execution.retraining import Watcher
from search.execution.train_list import TrainingList
from search.terminal import REFRESH_SECONDS, print_line, shares, step_progress, training_line
from trials.records.events import Progress
from trials.records.job import Job
from trials.records.trial_record import TrialRecord


class RetrainingsView:
    """Shows the retrainings of a finished study; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._total = self._done = self._done_before = 0
        self._began = self._drawn = time.monotonic()
        self._running: dict[int, tuple[TrialRecord, Progress]] = {}

    def __enter__(self) -> RetrainingsView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def watcher(self) -> Watcher:
        """What retrainings tell of themselves."""
        return Watcher(
            changed=self._changed,
            wanted=self._wanted,
            progress=lambda record, progress: self._running.update({record.number: (record, progress)}),
            on_poll=self._on_poll,
            say=partial(print_line, self._console),
        )

    def _changed(self, record: TrialRecord, ended: bool) -> None:
        """Says that a retraining has ended, and how many of how many that makes."""
        if ended:
            self._done += 1
            self._running.pop(record.number, None)
            print_line(self._console, f"{retrained_line(record)} ({self._how_far()})")

    def _wanted(self, total: int, done: int) -> None:
        self._total, self._done, self._done_before = total, done, done
        self._began = time.monotonic()

    def _on_poll(self) -> None:
        if self._live and time.monotonic() - self._drawn > REFRESH_SECONDS:
            self._drawn = time.monotonic()
            running = [one for _, one in sorted(self._running.items())]
            lines = [training_line(record, progress) for record, progress in running]
            self._live.update(Group(Text(self._how_far()), *lines), refresh=True)

    def _how_far(self) -> str:
        """`3/12 retrainings, about 40 s left`."""
        done = self._done + sum(shares({n: progress for n, (_, progress) in self._running.items()}).values())
        work, seconds = done - self._done_before, time.monotonic() - self._began
        left = f", about {duration(seconds / work * (self._total - done))} left" if work > 0 else ""
        return f"{self._done}/{self._total} retrainings" + (left if self._done < self._total else "")


# What the terminal says while a list of trainings goes on.


class TrainingsView(NamedTuple):
    """A bar of all examples, a line for each training that ends."""

    step: str
    names: Mapping[str, str]
    """Names of the trainings, by the fingerprint of the job."""
    console: Console
    show: OnProgress
    total: int
    """The most examples that are trained."""

    def ended(self, record: TrialRecord) -> None:
        """Prints a line for a training that has ended."""
        ne = record.result.curve[-1].validation.ne if record.result.curve else None
        how = f"NE {decimals(ne, 5)}" if record.result.error is None else record.result.error
        name = self.names[record.job.fingerprint]
        print_line(self.console, f"{name}: {how}, {duration(record.result.seconds)}")

    def progress(self, examples: int) -> None:
        """Moves the bar to this number of examples."""
        self.show(self.step, examples, self.total)


def trained(
    trainings: TrainingList, jobs: Sequence[tuple[str, Job]], step: str, console: Console, rows: int
) -> dict[str, TrialRecord]:
    """Trains what a list lacks of these jobs, and returns their records by fingerprint.

    Args:
        trainings: the list.
        jobs: the jobs with their names.
        step: what the bar is called.
        console: where it is shown.
        rows: number of training rows of the log.
    """
    wanted = [job for _, job in jobs]
    finished = trainings.finished(wanted)
    todo = {job.fingerprint: job for job in wanted if job.fingerprint not in finished}
    if todo:
        names = {job.fingerprint: name for name, job in jobs}
        total = sum(job.training.examples(rows) for job in todo.values())
        with step_progress(console) as progress:
            view = TrainingsView(step, names, console, progress, total)
            trainings.run(wanted, view.ended, view.progress)
    return trainings.finished(wanted)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, the titles first; all columns but the first are of numbers."""
    titles, *rows = lines
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *rows))
