"""Starts trainings, scorings and measurements on one log, each in fresh processes in a folder of its own."""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path

from dhen.config import ModelConfig
from search.execution.jobs import job_on
from search.execution.late_run import LateRun
from search.execution.reduce_events import AttemptContext
from search.execution.running import Scoring, Timing, Training, look
from search.planning.attempts import Execution
from search.run_directory import CHECKPOINTS, TEACHERS, folder_of
from trials.cluster.machine import Precision, cores, fastest_threads, preferred_precision
from trials.data.cache import PreparedLog
from trials.job import Job, TrainingConfig
from trials.processes.launcher import POLL_SECONDS, AnyLauncher
from trials.processes.task import Task
from trials.record import TrialKind, TrialRecord
from trials.serving_limits import ServingConfig

LOG = logging.getLogger(__name__)
SERVING = "serving"
"""The folder in a run directory of the process that measures a forward time."""


class Trainer:
    """Trains and scores on one log."""

    def __init__(
        self,
        launcher: AnyLauncher,
        log: PreparedLog,
        directory: Path,
        *,
        threads: int | None = None,
        precision: Precision | None = None,
        execution: Execution | None = None,
        ranks_at_once: int | None = None,
    ) -> None:
        """A trainer below `directory`; by default with as many threads as gain, and in the preferred precision.

        `ranks_at_once` is the largest number of ranks of all trials together, where trials differ in them.
        """
        self.ranks_at_once = ranks_at_once
        self._launcher = launcher
        self._log = log
        self._directory = self._root = directory
        self._threads = threads or fastest_threads(cores())
        self.precision: Precision = precision or preferred_precision()
        self.execution = execution or Execution()

    def job(self, model: ModelConfig, training: TrainingConfig, seed: int) -> Job:
        """The job of training this model on this log."""
        return job_on(self._log, model, training, seed, self.precision)

    def folder(self, record: TrialRecord) -> Path:
        """A trial's folder: its events, its ranks' logs, its weights."""
        return folder_of(self._directory, record)

    def teacher_file(self, teacher: str) -> Path:
        """File of what the average with this fingerprint predicts for the training rows."""
        return self._root / TEACHERS / f"{teacher}.npy"

    def below(self, name: str) -> Trainer:
        """This trainer in a folder of this one's directory."""
        trainer = copy.copy(self)
        trainer._directory = self._directory / name
        return trainer

    def start(
        self,
        record: TrialRecord,
        job: Job,
        *,
        start_from: Path | None = None,
        seconds: float | None = None,
    ) -> Training:
        """A training, with the strategy that was planned if plans are executed; a scheduler begins it. It is
        stopped after so many `seconds`, if they are given.

        Raises:
            UserError: where this machine lacks what the strategy needs.
        """
        self.execution.check(record, job)
        strategy = self.execution.strategy(record)
        folder = self.folder(record)
        folder.mkdir(parents=True, exist_ok=True)
        task = self._task(job).replace(
            **self.execution.task_fields(record, job),
            attempt=len(record.attempts),
            start_from=str(start_from) if start_from else None,
            ends_at=None if seconds is None else time.time() + seconds,
            resume_from=str(folder / CHECKPOINTS),
        )
        LOG.info("%s %d: attempt %d as %s", _word(record), record.number, task.attempt, strategy.name)
        return Training(
            record.with_result(technique=None),
            job,
            self._late(task, folder, record),
            AttemptContext(strategy, self.execution.counted, self.execution.cluster is not None),
            self.execution.corrections,
        )

    def start_scoring(
        self, record: TrialRecord, job: Job, split: str, *, keep_logits: bool = False
    ) -> Scoring:
        """A scoring of a trial's kept weights on a split, which a scheduler begins; its logits stay in the trial's
        folder if wanted."""
        task = self._task(job).replace(
            **self.execution.task_fields(record, job),
            score_split=split,
            keep_logits=keep_logits,
        )
        LOG.info("%s %d: is scored on %s", _word(record), record.number, split)
        return Scoring(record, job, split, self._late(task, self.folder(record), record))

    def forward_ms(self, job: Job, serving: ServingConfig) -> float:
        """Milliseconds that a request to a job's model takes, measured in a fresh process on this machine.

        Raises:
            UserError: where the process ends without a result.
        """
        folder = self._directory / SERVING
        folder.mkdir(parents=True, exist_ok=True)
        task = self._task(job).replace(threads=serving.threads, serving=serving)
        timing = Timing(LateRun(lambda: self._launcher.start(task, folder)))
        timing.run.begin()
        try:
            while not timing.run.ended:
                look([timing], POLL_SECONDS)
        except BaseException:
            timing.run.kill()
            raise
        return timing.forward.ms

    def _late(self, task: Task, folder: Path, record: TrialRecord) -> LateRun:
        return LateRun(lambda: self._launcher.start(task, folder), self.execution.ranks(record))

    def _task(self, job: Job) -> Task:
        return Task(
            job=job,
            teacher=str(self.teacher_file(job.teacher)) if job.teacher is not None else None,
            log_directory=str(self._log.directory),
            threads=self._threads,
            debug=LOG.isEnabledFor(logging.DEBUG),  # as the command was asked to with -vv
        )


def _word(record: TrialRecord) -> str:
    """The word for what a record's number counts: retrainings are numbered apart from trials."""
    return "retraining" if record.kind is TrialKind.RETRAINING else "trial"
