"""Starts trainings, scorings and measurements on one log, each in fresh processes in a folder of its own."""

from __future__ import annotations

import copy
import datetime
import logging
import time
from pathlib import Path
from typing import Any

from dhen.config import DhenConfig, ModelConfig
from dhen.cost import dense_parameters, embedding_parameters, headline_flops
from dhen.errors import UserError
from dhen.model import model_cost, parse_model
from dhen.values import parse
from search.execution.attempts import Execution
from search.execution.reduce_events import AttemptContext
from search.execution.running import LateRun, Scoring, Training, new_events, reasons
from search.run_directory import CHECKPOINTS, TEACHERS, folder_of
from spaces.space import Candidate, Point, Space
from trials.cluster.machine import Precision, cores, fastest_threads, preferred_precision
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event, TimingEvent
from trials.records.job import Job, TrainingConfig, check_order
from trials.records.serving_limits import ServingConfig, weights_bytes
from trials.records.strategy import named
from trials.records.task import Task
from trials.records.trial_record import JobSummary, Origin, Refit, TrialKind, TrialRecord
from trials.runtime.launcher import POLL_SECONDS, AnyLauncher, wait_for

# From models to jobs, and from jobs to the records of trials that are about to start.

REFIT_AVERAGE = 4
"""Largest number of the last evaluations of a refit whose weights' mean is kept, if the training says nothing:
no rows are left that could tell the better ones apart (docs/benchmarks/refit.md). It is half of them at most."""
MOST_COPIED = 2 * 1024**3
"""Largest number of bytes of weights, in fp32, that a refit copies into host memory for that mean, which no plan
counts: with larger tables it is of fewer evaluations, or the last weights are kept."""


def job_on(
    log: PreparedLog, model: ModelConfig, training: TrainingConfig, seed: int, precision: Precision
) -> Job:
    """The job of training a model on a log; `precision` is what `auto` means.

    Raises:
        UserError: for settings that do not go together.
    """
    check_order(log.features, training)
    return Job(
        model=model,
        features=log.features,
        log=log.fingerprint,
        training=training.resolved(log.manifest.rows["train"], precision),
        seed=seed,
    )


def candidate_training(shared: TrainingConfig, candidate: Candidate) -> TrainingConfig:
    """Training settings that all candidates share, with those that the space decides here; the rest is open."""
    return parse(TrainingConfig, shared.to_dict() | candidate.training, "space")


def on_all_rows(training: TrainingConfig, candidate: Candidate) -> TrainingConfig:
    """A candidate's training on all rows of the log, with what is left open; `training` is shared by all."""
    return candidate_training(training, candidate).replace(train_fraction=1.0)


def candidate_of(trial: TrialRecord, space: Space) -> Candidate:
    """What a candidate's trial stands for: its point, or the proposal outside the space that it is."""
    if not trial.outside_space:
        return space.decode(trial.point)
    assert trial.origin.proposal is not None
    model = parse_model(trial.job.model, "ledger")
    assert isinstance(model, DhenConfig), "no other model is taken as a candidate"
    return Candidate(model=model, training=trial.origin.proposal.training)


def trained_job(
    trial: TrialRecord, log: PreparedLog, *, seed_shift: int = 0, origin: int | None = None
) -> Job:
    """The job that a finished trial has done, with its seed moved by `seed_shift`, or at an earlier origin. An
    average has none; its members have."""
    return Job(
        model=parse_model(trial.job.model, "ledger"),
        features=log.features,
        log=log.fingerprint,
        training=parse(TrainingConfig, trial.job.training, "ledger"),
        seed=trial.job.seed + seed_shift,
        origin=origin if origin is not None else trial.job.origin,
        refit=trial.job.refit,
        teacher=trial.job.teacher,
        period=trial.job.period,
    )


def refit_job(network: TrialRecord, log: PreparedLog, *, seed_shift: int = 0) -> Job:
    """Returns the job of training a network once more, on the rows of training and validation together, as long as
    its training had taken to its best."""
    job, rows = trained_job(network, log, seed_shift=seed_shift), log.manifest.rows
    training = job.training
    assert training.evaluate_every is not None
    longer = (rows["train"] + rows["validation"]) / rows["train"]
    technique = network.plan.technique
    # tables that lie below the device's memory, or on servers, are too large for copies of them
    copied = not training.tables.on_servers and (technique is None or named(technique).tables == "device")
    refit = Refit.of(network.result.curve)
    last = min(REFIT_AVERAGE, refit.evaluations // 2, MOST_COPIED // max(1, network.job.weights_bytes or 0))
    refit = refit.replace(
        evaluate_every=max(1, round(longer * training.evaluate_every)),
        weight_average=last if copied and last > 1 and not training.weight_average else None,
    )
    return job.replace(refit=refit)


def new_record(number: int, kind: TrialKind, point: Point, job: Job, **origin: Any) -> TrialRecord:
    """A trial that is about to start, with all that is known before its plan; `origin` has fields of `Origin`."""
    cost = model_cost(job.model, job.features)
    return TrialRecord(
        number=number,
        kind=kind,
        point=point,
        origin=Origin(started_at=now(), **origin),
        job=JobSummary(
            fingerprint=job.fingerprint,
            seed=job.seed,
            model=job.model.to_dict(),
            training=job.training.to_dict(),
            cost=cost,
            flops=headline_flops(cost),
            parameters=dense_parameters(cost),
            embedding_parameters=embedding_parameters(cost),
            weights_bytes=weights_bytes(cost),
            origin=job.origin,
            refit=job.refit,
            teacher=job.teacher,
            period=job.period,
        ),
    )


def now() -> str:
    """This moment as records have it: ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


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

        `ranks_at_once` is the largest number of ranks of all trials together, if trials differ in them.
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
            UserError: if this machine lacks what the strategy needs.
        """
        self.execution.check(record, job)
        strategy = self.execution.strategy(record)
        folder = self.folder(record)
        folder.mkdir(parents=True, exist_ok=True)
        task = self._task(
            job,
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
        fields = self.execution.task_fields(record, job)
        task = self._task(job, **fields, score_split=split, keep_logits=keep_logits)
        LOG.info("%s %d: is scored on %s", _word(record), record.number, split)
        return Scoring(record, job, split, self._late(task, self.folder(record), record))

    def forward_ms(self, job: Job, serving: ServingConfig) -> float:
        """Milliseconds that a request to a job's model takes, measured in a fresh process on this machine.

        Raises:
            UserError: if the process ends without a result.
        """
        folder = self._directory / SERVING
        folder.mkdir(parents=True, exist_ok=True)
        task = self._task(job, threads=serving.threads, serving=serving)
        run, said = self._launcher.start(task, folder), list[Event]()
        try:
            while not run.ended:
                wait_for([run], POLL_SECONDS)
                said += new_events(run)
        except BaseException:
            run.kill()
            raise
        for event in said:
            if isinstance(event, TimingEvent):
                return event.forward.ms
        raise UserError(f"its forward time could not be measured: {reasons(said)}")

    def _late(self, task: Task, folder: Path, record: TrialRecord) -> LateRun:
        return LateRun(lambda: self._launcher.start(task, folder), self.execution.ranks(record))

    def _task(self, job: Job, **fields: Any) -> Task:
        task = Task(
            job=job,
            teacher=str(self.teacher_file(job.teacher)) if job.teacher is not None else None,
            log_directory=str(self._log.directory),
            threads=self._threads,
            debug=LOG.isEnabledFor(logging.DEBUG),  # as the command was asked to with -vv
        )
        return task.replace(**fields)


def _word(record: TrialRecord) -> str:
    """The word for what a record's number counts: retrainings are numbered apart from trials."""
    return "retraining" if record.kind is TrialKind.RETRAINING else "trial"
