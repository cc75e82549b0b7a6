"""A list of trainings, such as a table's: each job once, several side by side, what is finished kept in a folder.

A finished training is `trainings/FINGERPRINT.json`, its record; a training that was cut short left its
checkpoint beside. Tables with one folder share the trainings that they have in common.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from search.execution.running import Training
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer, new_record
from trials.cluster.machine import Precision, preferred_precision
from trials.records.job import Job
from trials.records.trial_record import TrialKind, TrialRecord

TRAININGS, PRECISION_FILE = "trainings", "precision.json"


def measured_precision(directory: Path) -> Precision:
    """The precision that `auto` means in this folder: measured once, for a second measurement may differ."""
    path = directory / PRECISION_FILE
    if not path.exists():
        write_atomically(path, json.dumps(preferred_precision()))
    precision: Precision = json.loads(path.read_text())
    return precision


class TrainingList:
    """The trainings in one folder, on one log."""

    def __init__(self, trainer: Trainer, directory: Path, *, side_by_side: int) -> None:
        """The trainings in `directory`, below which `trainer` works."""
        self._trainer, self._folder = trainer, directory / TRAININGS
        self._scheduler = Scheduler[Training](side_by_side)
        self._folder.mkdir(parents=True, exist_ok=True)

    def finished(self, jobs: Iterable[Job]) -> dict[str, TrialRecord]:
        """Records of the jobs that are done, by fingerprint.

        Raises:
            UserError: naming a file that is damaged.
        """
        paths = {job.fingerprint: self._path(job.fingerprint) for job in jobs}
        return {name: _read(path) for name, path in paths.items() if path.exists()}

    def run(
        self,
        jobs: Sequence[Job],
        on_end: Callable[[TrialRecord], None],
        on_progress: Callable[[int], None],
    ) -> None:
        """Trains the jobs that are not done; Ctrl-C ends the processes and is raised again.

        Args:
            jobs: the trainings that are wanted.
            on_end: is called with the record of each that is over.
            on_progress: is called with how many of the examples that had to be trained are done.

        Raises:
            UserError: if a training ends without a result, saying how.
        """
        unique = {job.fingerprint: job for job in jobs}
        done = self.finished(unique.values())
        for name in done:  # of one that ended as Ctrl-C came, before its folder was removed
            shutil.rmtree(self._folder / name, ignore_errors=True)
        seen = 0

        def start(record: TrialRecord, job: Job) -> Training:
            return self._trainer.below(f"{TRAININGS}/{job.fingerprint}").start(record, job)

        def ended(training: Training) -> Iterable[Training]:
            nonlocal seen
            next_attempt = self._trainer.execution.next_attempt(training.record, training.job)
            if next_attempt is not None:
                return [start(next_attempt, training.job)]
            seen += training.examples
            on_end(training.record)
            result, name = training.record.result, training.job.fingerprint
            if not result.outcome.is_final:
                raise UserError(
                    f"a training ended as {result.outcome}: {result.error} "
                    "What is finished is safe; the same command goes on."
                )
            write_atomically(self._path(name), training.record.model_dump_json(indent=1))
            shutil.rmtree(self._folder / name)
            return []

        def on_poll() -> None:
            on_progress(seen + sum(training.examples for training in self._scheduler.running))

        waiting = [job for name, job in unique.items() if name not in done]
        upcoming = (start(new_record(0, TrialKind.CANDIDATE, {}, job), job) for job in waiting)
        self._scheduler.run(upcoming, ended, on_poll=on_poll)

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.json"


def _read(path: Path) -> TrialRecord:
    try:
        return TrialRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError:
        raise UserError(f"{path} is damaged; remove it, and its training is done again.") from None


# One training by itself, as `dhen-search train` wants it, tried again as a study would try it.


def train_one(
    record: TrialRecord,
    job: Job,
    trainer: Trainer,
    on_change: Callable[[TrialRecord], None],
    *,
    start_from: Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> TrialRecord:
    """The record of a finished training; one that runs out of memory, or is killed, has its next attempts.

    Ctrl-C ends the processes and is raised again.

    Args:
        record: the record of a trial that is about to start.
        job: the job that is trained.
        trainer: starts the processes.
        on_change: is called as the record grows.
        start_from: a weights file to begin with in place of fresh weights.
        say: is called with sentences for people, such as on a rank that is slow.

    Raises:
        UserError: if this machine lacks what the strategy needs.
    """

    def start(attempt: TrialRecord) -> Training:
        return trainer.start(attempt, job, start_from=start_from)

    def on_events(training: Training) -> bool:
        on_change(training.record)
        for notice in training.take_notices():
            say(notice)
        return False

    def ended(training: Training) -> Iterable[Training]:
        nonlocal record
        next_attempt = trainer.execution.next_attempt(training.record, job)
        if next_attempt is None:
            record = trainer.execution.ended(training.record, job)
            return []
        return [start(next_attempt)]

    Scheduler[Training](1).run(iter([start(record)]), ended, on_events=on_events)
    return record
