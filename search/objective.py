"""One candidate's training: a job becomes a record, its events become the record's curve and outcome."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path

from dhen.config import ModelConfig
from dhen.cost import dense_parameters, embedding_parameters, headline_flops
from dhen.model import model_cost
from spaces.space import Point
from trials.data.cache import PreparedLog
from trials.events import Diverged, Evaluated, Event, Failed, Progress, Scored, Trained
from trials.hardware import Precision, preferred_precision
from trials.job import Job, TrainingConfig
from trials.launcher import Launcher
from trials.record import Metrics, Outcome, TrialKind, TrialRecord
from trials.worker import Task

TECHNIQUE = "dp"
"""One process, nothing sharded: the empty set of memory techniques."""

OnChange = Callable[[TrialRecord, Progress | None], None]


def new_record(
    number: int, kind: TrialKind, point: Point, job: Job, *, outcome: Outcome = Outcome.RUNNING
) -> TrialRecord:
    """A trial that is about to start, with all that is known before training."""
    cost = model_cost(job.model, job.features)
    return TrialRecord(
        number=number,
        kind=kind,
        outcome=outcome,
        fingerprint=job.fingerprint,
        point=point,
        model=job.model.to_dict(),
        training=job.training.to_dict(),
        cost=cost,
        flops=headline_flops(cost),
        parameters=dense_parameters(cost),
        embedding_parameters=embedding_parameters(cost),
        planned_technique=TECHNIQUE,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


class Trainer:
    """Trains and scores on one log, each time in a fresh process."""

    def __init__(
        self,
        launcher: Launcher,
        log: PreparedLog,
        directory: Path,
        *,
        threads: int | None = None,
        precision: Precision | None = None,
    ) -> None:
        """`threads` are all cores and `precision` the one that this machine prefers where not given."""
        self._launcher = launcher
        self._log = log
        self._directory = directory
        self._threads = threads or os.cpu_count() or 1
        self.precision: Precision = precision or preferred_precision()

    def job(self, model: ModelConfig, training: TrainingConfig, seed: int) -> Job:
        """The job of training this model on this log."""
        return Job(
            model=model,
            features=self._log.features,
            log=self._log.fingerprint,
            training=training.resolved(self._log.split("train").rows, self.precision),
            seed=seed,
        )

    def folder(self, number: int) -> Path:
        """A trial's directory: its events, its rank's log, its weights."""
        return self._directory / f"{number:05d}"

    def train(
        self, record: TrialRecord, job: Job, on_change: OnChange, *, start_from: Path | None = None
    ) -> TrialRecord:
        """The record of a finished training; `on_change` sees it grow. Ctrl-C ends the process and goes on up."""
        task = self._task(job).model_copy(update={"start_from": str(start_from) if start_from else None})
        began = time.monotonic()
        run = self._launcher.start(task, self._fresh_folder(record.number))
        try:
            for event in run.events():
                if isinstance(event, Progress):
                    on_change(record, event)
                elif event is not None:
                    record = absorb(record, event)
                    if record.outcome is Outcome.RUNNING:
                        on_change(record, None)
        except BaseException:
            run.kill()
            raise
        return record.model_copy(update={"seconds": time.monotonic() - began})

    def score(self, record: TrialRecord, job: Job, split: str) -> Metrics:
        """Metrics of a trial's kept weights on a split."""
        run = self._launcher.start(
            self._task(job).model_copy(update={"score_split": split}), self.folder(record.number)
        )
        try:
            events = [event for event in run.events() if event is not None]
        except BaseException:
            run.kill()
            raise
        for event in events:
            if isinstance(event, Scored):
                return event.metrics
        raise RuntimeError(f"trial {record.number} could not be scored on {split}: {events}")

    def _task(self, job: Job) -> Task:
        return Task(job=job, log_directory=str(self._log.directory), threads=self._threads)

    def _fresh_folder(self, number: int) -> Path:
        folder = self.folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def absorb(record: TrialRecord, event: Event) -> TrialRecord:
    """The record after one event."""
    if isinstance(event, Evaluated):
        return record.model_copy(update={"curve": (*record.curve, event.point)})
    if isinstance(event, Trained):
        return record.model_copy(
            update={
                "outcome": Outcome.COMPLETED,
                "validation": event.best,
                "examples_per_second": event.examples_per_second,
                "step_ms": event.step_ms,
                "peak_memory_bytes": event.peak_memory_bytes,
                "train_seconds": event.train_seconds,
                "evaluate_seconds": event.evaluate_seconds,
                "executed_technique": TECHNIQUE,
            }
        )
    if isinstance(event, Diverged):
        error = f"the loss was {event.loss} at step {event.step}"
        return record.model_copy(update={"outcome": Outcome.DIVERGED, "error": error})
    if isinstance(event, Failed):
        outcome = Outcome.OUT_OF_MEMORY if event.out_of_memory else Outcome.FAILED
        return record.model_copy(update={"outcome": outcome, "error": event.error})
    return record
