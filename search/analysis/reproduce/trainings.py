"""A list of trainings, such as a table's: each job once, several side by side, what is finished kept in a folder.

A finished one is `trainings/FINGERPRINT.json`, its record; one that was cut short left its checkpoint beside.
Tables with one folder share what they have in common.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from search.execution.running import Training, killed_on_error, look
from search.execution.trainer import Trainer, new_record
from trials.cluster.machine import Precision, preferred_precision
from trials.job import Job
from trials.processes.launcher import POLL_SECONDS
from trials.record import Outcome, TrialKind, TrialRecord

TRAININGS, PRECISION_FILE = "trainings", "precision.json"
RESULTS = (Outcome.COMPLETED, Outcome.DIVERGED)
"""Ends that a table can show; after others the same command tries again."""


class Watcher(Protocol):
    """Hears how the trainings go."""

    def ended(self, record: TrialRecord) -> None:
        """One is over."""

    def progress(self, examples: int) -> None:
        """So many examples of those that had to be trained are done."""


def measured_precision(directory: Path) -> Precision:
    """What `precision=auto` means in this folder: measured once, for a second measurement may differ."""
    path = directory / PRECISION_FILE
    if not path.exists():
        write_atomically(path, json.dumps(preferred_precision()))
    precision: Precision = json.loads(path.read_text())
    return precision


class Trainings:
    """Those in one folder, on one log."""

    def __init__(self, trainer: Trainer, directory: Path, *, parallel: int) -> None:
        """`trainer` works below `directory`."""
        self._trainer, self._folder, self._parallel = trainer, directory / TRAININGS, parallel
        self._running: list[Training] = []
        self._folder.mkdir(parents=True, exist_ok=True)

    def finished(self, jobs: Iterable[Job]) -> dict[str, TrialRecord]:
        """Records of those of the jobs that are done, by fingerprint.

        Raises:
            UserError: naming a file that is damaged.
        """
        paths = {job.fingerprint: self._path(job.fingerprint) for job in jobs}
        return {name: _read(path) for name, path in paths.items() if path.exists()}

    def run(self, jobs: Sequence[Job], watcher: Watcher) -> None:
        """Trains those that are not done; Ctrl-C ends the processes and goes on up.

        Raises:
            UserError: where one ends without a result, saying how.
        """
        unique = {job.fingerprint: job for job in jobs}
        done = self.finished(unique.values())
        for name in done:  # of one that ended as Ctrl-C came, before its folder was removed
            shutil.rmtree(self._folder / name, ignore_errors=True)
        waiting = [job for name, job in unique.items() if name not in done]
        examples = 0
        with killed_on_error(self._running):
            while waiting or self._running:
                while waiting and len(self._running) < self._parallel:
                    job = waiting.pop(0)
                    self._start(new_record(0, TrialKind.CANDIDATE, {}, job), job)
                for training in look(self._running, POLL_SECONDS):
                    if training.run.ended and self._is_over(training):
                        examples += _examples(training)
                        watcher.ended(training.record)
                        self._keep(training.record)
                watcher.progress(examples + sum(map(_examples, self._running)))

    def _start(self, record: TrialRecord, job: Job) -> None:
        own = self._trainer.below(f"{TRAININGS}/{job.fingerprint}")
        self._running.append(own.start(record, job))

    def _is_over(self, training: Training) -> bool:
        """One that was killed from outside is not: it has a second try."""
        self._running.remove(training)
        again = self._trainer.execution.next_attempt(training.record, training.job, "least")
        if again is not None:
            self._start(again, training.job)
        return again is None

    def _keep(self, record: TrialRecord) -> None:
        """The result; not its weights and its log, unless it has none."""
        if record.outcome not in RESULTS:
            raise UserError(
                f"a training ended as {record.outcome}: {record.error} "
                "What is finished is safe; the same command goes on."
            )
        write_atomically(self._path(record.fingerprint), record.model_dump_json(indent=1))
        shutil.rmtree(self._folder / record.fingerprint)

    def _path(self, fingerprint: str) -> Path:
        return self._folder / f"{fingerprint}.json"


def _read(path: Path) -> TrialRecord:
    try:
        return TrialRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError:
        raise UserError(f"{path} is damaged; remove it, and its training is done again.") from None


def _examples(training: Training) -> int:
    """Of this training so far; all, where it has ended."""
    if training.run.ended and training.record.curve:
        return training.record.curve[-1].examples
    return training.progress.examples if training.progress else 0
