"""One candidate's training: a job becomes a process, whose events become the record's curve and outcome."""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dhen.config import ModelConfig
from dhen.cost import dense_parameters, embedding_parameters, headline_flops
from dhen.model import model_cost
from dhen.values import parse
from search.execution.running import Scoring, Timing, Training, killed_on_error, look
from search.planning.attempts import DP, Execution
from search.run_directory import trial_folder
from spaces.space import Candidate, Point
from trials.cluster.machine import Precision, cores, fastest_threads, preferred_precision
from trials.data.cache import PreparedLog
from trials.events import Progress
from trials.job import Job, TrainingConfig
from trials.planner.plan import Prefer
from trials.processes.launcher import POLL_SECONDS, AnyLauncher
from trials.processes.worker import Task
from trials.record import Metrics, Outcome, TrialKind, TrialRecord
from trials.serving_limits import ServingConfig, weights_bytes

CHECKPOINTS = "checkpoints"
"""The folder in a trial's directory from which a training that was cut short goes on."""
SERVING = "serving"
"""The folder in a run directory of the process that measures a forward time."""
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
        weights_bytes=weights_bytes(cost),
        planned_technique=DP.name,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
    )


def candidate_training(shared: TrainingConfig, candidate: Candidate) -> TrainingConfig:
    """What all candidates share, with what the space decides for this one; the rest is left open."""
    return parse(TrainingConfig, shared.to_dict() | candidate.training, "space")


def job_on(
    log: PreparedLog, model: ModelConfig, training: TrainingConfig, seed: int, precision: Precision
) -> Job:
    """The job of training a model on a log; `precision` is what `auto` means."""
    return Job(
        model=model,
        features=log.features,
        log=log.fingerprint,
        training=training.resolved(log.manifest.rows["train"], precision),
        seed=seed,
    )


class Trainer:
    """Trains and scores on one log, each time in a fresh process."""

    def __init__(
        self,
        launcher: AnyLauncher,
        log: PreparedLog,
        directory: Path,
        *,
        threads: int | None = None,
        precision: Precision | None = None,
        execution: Execution | None = None,
    ) -> None:
        """Works below `directory`; by default with as many threads as gain, in the precision preferred here."""
        self._launcher = launcher
        self._log = log
        self._directory = directory
        self._threads = threads or fastest_threads(cores())
        self.precision: Precision = precision or preferred_precision()
        self.execution = execution or Execution()

    def job(self, model: ModelConfig, training: TrainingConfig, seed: int) -> Job:
        """The job of training this model on this log."""
        return job_on(self._log, model, training, seed, self.precision)

    def folder(self, number: int) -> Path:
        """A trial's directory: its events, its rank's log, its weights."""
        return trial_folder(self._directory, number)

    def below(self, name: str) -> Trainer:
        """The same, in a folder of this one's directory."""
        other = copy.copy(self)
        other._directory = self._directory / name
        return other

    def start(self, record: TrialRecord, job: Job, *, start_from: Path | None = None) -> Training:
        """A training that has begun, with the strategy that was planned where plans are executed.

        Raises:
            UserError: where this machine lacks what the strategy needs.
        """
        self.execution.check(job)
        strategy = self.execution.strategy(record)
        fields = self.execution.task_fields(strategy)
        folder = self.folder(record.number)
        folder.mkdir(parents=True, exist_ok=True)
        fields |= {
            "start_from": str(start_from) if start_from else None,
            "resume_from": str(folder / CHECKPOINTS),
        }
        task = self._task(job).replace(**fields)
        began = time.monotonic()
        record = record.replace(executed_technique=strategy.name)
        run = self._launcher.start(task, folder)
        planned_here = self.execution.cluster is not None
        return Training(record, job, run, began, counted=self.execution.counted, planned_here=planned_here)

    def train(
        self,
        record: TrialRecord,
        job: Job,
        on_change: OnChange,
        *,
        start_from: Path | None = None,
        prefer: Prefer = "least",
    ) -> TrialRecord:
        """The record of a finished training; `on_change` sees it grow. Ctrl-C ends the process and goes on up.

        What runs out of memory, or is killed, is tried again as in a study.
        """
        again: TrialRecord | None = record
        while again is not None:
            training = self.start(again, job, start_from=start_from)
            with killed_on_error([training]):
                while not training.run.ended:
                    if look([training]):
                        on_change(training.record, training.progress)
            again = self.execution.next_attempt(training.record, job, prefer)
        return training.record

    def scores(
        self,
        trained: Iterator[tuple[TrialRecord, Job]],
        split: str,
        *,
        side_by_side: int = 1,
        keep_logits: bool = False,
    ) -> Iterator[tuple[TrialRecord, Metrics]]:
        """Metrics of trials' kept weights on a split, as they come; one is taken up when there is room for it.

        Their logits stay in the trials' folders if wanted.

        Raises:
            UserError: where a process ends without a result; one that was killed from outside has a second try.
        """
        going: list[Scoring] = []
        again: set[int] = set()
        with killed_on_error(going):
            while True:
                new = next(trained, None) if len(going) < side_by_side else None
                if new is not None:
                    going.append(self.start_scoring(*new, split, keep_logits=keep_logits))
                elif not going:
                    return
                for scoring in look(list(going), 0.0 if new else POLL_SECONDS):
                    if not scoring.run.ended:
                        continue
                    going.remove(scoring)
                    if scoring.killed and scoring.record.number not in again:
                        again.add(scoring.record.number)
                        record, job = scoring.record, scoring.job
                        going.append(self.start_scoring(record, job, split, keep_logits=keep_logits))
                    else:
                        yield scoring.record, scoring.metrics

    def score(self, record: TrialRecord, job: Job, split: str) -> Metrics:
        """Metrics of one trial's kept weights on a split."""
        ((_, metrics),) = self.scores(iter([(record, job)]), split)
        return metrics

    def start_scoring(
        self, record: TrialRecord, job: Job, split: str, *, keep_logits: bool = False
    ) -> Scoring:
        """A scoring of a trial's kept weights that has begun; its logits stay in the trial's folder if wanted."""
        fields = self.execution.task_fields(self.execution.strategy(record))
        task = self._task(job).replace(**(fields | {"score_split": split, "keep_logits": keep_logits}))
        return Scoring(record, job, split, self._launcher.start(task, self.folder(record.number)))

    def forward_ms(self, job: Job, serving: ServingConfig) -> float:
        """How long a request to a job's model takes, measured in a fresh process on this machine.

        Raises:
            UserError: where the process ends without a result.
        """
        folder = self._directory / SERVING
        folder.mkdir(parents=True, exist_ok=True)
        task = self._task(job).replace(threads=serving.threads, serving=serving)
        timing = Timing(self._launcher.start(task, folder))
        with killed_on_error([timing]):
            while not timing.run.ended:
                look([timing])
        return timing.forward.ms

    def _task(self, job: Job) -> Task:
        return Task(job=job, log_directory=str(self._log.directory), threads=self._threads)
