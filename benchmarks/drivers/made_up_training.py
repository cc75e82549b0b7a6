"""A launcher whose trainings are made up: a thread that waits and says a result stands in place of a process.

The stand-in of `benchmarks.drivers` alone. NE is drawn from the job's fingerprint, and somewhat lower with more
layers, so that samplers, front and report have what they need; it says nothing of any model. All else is as it is:
the events go through the file that a rank writes, and the driver watches, reads and keeps what it always does.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from dhen.config import DhenConfig
from trials.records.events import EVENTS, WEIGHTS, EvaluationEvent, EventWriter, TrainingEvent, WrapEvent
from trials.records.job import Job
from trials.records.task import Task
from trials.records.trial_record import CurvePoint, Measurements, Metrics
from trials.runtime.launcher import Launcher, Run, forget_last_run
from trials.runtime.rank_process import RankProcess

EVALUATIONS = 10
"""Number of points on a curve."""
EXAMPLES = 100_000
LEVEL, SPREAD, PER_LAYER = 0.85, 0.05, 0.005
"""NE of a network without layers, at most; how far chance takes it down; and each layer."""


class MadeUpTrainings(Launcher):
    """A launcher that starts no processes."""

    def __init__(self, seconds: float) -> None:
        """A launcher of trainings that take so many seconds."""
        super().__init__()
        self._seconds = seconds

    def start(self, task: Task, directory: Path) -> Run:
        """Begins a training of one rank that is made up; nothing but trainings can be."""
        assert task.score_split is None, "only trainings are made up"
        assert task.serving is None, "only trainings are made up"
        forget_last_run(directory, task.ranks_here)
        rank: RankProcess = _MadeUpRank(task, directory, self._seconds)
        return Run({0: rank}, task.logs(directory), deadline_seconds=task.deadline_seconds)


class _MadeUpRank:
    """A thread in place of a rank's process."""

    def __init__(self, task: Task, directory: Path, seconds: float) -> None:
        self.killed: str | None = None
        self.sentinel, self._end = os.pipe()
        self._task, self._directory, self._seconds = task, directory, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        os.close(self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """See `RankProcess`."""
        return None if self.is_alive() else 0

    def is_alive(self) -> bool:
        """See `RankProcess`."""
        return self._thread.is_alive()

    def is_stopped(self) -> bool:
        """See `RankProcess`."""
        return False

    def show_stack(self) -> None:
        """See `RankProcess`."""

    def kill(self) -> None:
        """See `RankProcess`."""
        self.killed = "running"
        self._stopped.set()

    def join(self) -> None:
        """See `RankProcess`."""
        self._thread.join()

    def _train(self) -> None:
        try:
            if not self._stopped.wait(self._seconds):
                write_training(self._task, self._directory, self._seconds)
        finally:
            os.close(self._end)


def write_training(task: Task, directory: Path, seconds: float) -> None:
    """Leaves what a rank leaves: its events, and a file in place of weights."""
    end = made_up_ne(task.job)
    with EventWriter(directory / EVENTS) as say:
        say(WrapEvent(strategy=task.strategy.name))
        for index in range(1, EVALUATIONS + 1):
            best = _metrics(end * (1 + 0.2 / index))
            point = CurvePoint(
                examples=EXAMPLES * index // EVALUATIONS,
                epoch=index / EVALUATIONS,
                train_loss=best.log_loss,
                learning_rate=0.001,
                seconds=seconds * index / EVALUATIONS,
                validation=best,
            )
            say(EvaluationEvent(point=point))
        (directory / WEIGHTS).touch()
        say(
            TrainingEvent(
                best=best, measured=Measurements(train_seconds=seconds, examples_per_second=EXAMPLES)
            )
        )


def made_up_ne(job: Job) -> float:
    """The NE that a job comes to, the same wherever it is trained."""
    layers = len(job.model.layers) if isinstance(job.model, DhenConfig) else 0
    chance = int(job.fingerprint, 16) / 16.0 ** len(job.fingerprint)
    return LEVEL - SPREAD * chance - PER_LAYER * layers


def _metrics(ne: float) -> Metrics:
    return Metrics(ne=ne, log_loss=0.5 * ne, auc=0.75, calibration=1.0, examples=EXAMPLES)
