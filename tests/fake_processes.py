"""Processes that are none: runs that say what they are told to say, and a launcher that starts such runs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.records.events import (
    WEIGHTS,
    DivergenceEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    Progress,
    ScoreEvent,
    TrainingEvent,
    WrapEvent,
    logits_file,
)
from trials.records.task import Task
from trials.records.trial_record import CurvePoint, Measurements, Metrics

PLANNED_ELSEWHERE = (
    "threads=1",
    "parallel=1",
    "cluster=zionex",
    "ranks=1x1",
    "training.batch_size=64",
    "training.precision=fp32",
)
"""Words for a study whose plans are for another cluster, so that nothing of this machine is measured."""
_READY, _writer = os.pipe()
os.close(_writer)
"""A pipe without a writer is ready at once, so that nobody waits for a process that is none."""

NE_FILE = "ne.txt"
"""The file in which a training leaves the NE that it came to, for its logits."""
MOST_LOOKS = 1000
"""What goes wrong ends a test that would wait for ever."""
Look = Sequence[Event]
"""What a run says at one look."""
SAID_WHILE_TRAINING = (Progress, EvaluationEvent, TrainingEvent, DivergenceEvent)


class FakeRun:
    """A `trials.runtime.launcher.AnyRun`: it says one look's events after the other, and ends with the last."""

    def __init__(self, *looks: Look, ends: bool = True) -> None:
        """`ends`: otherwise the run goes on in silence until it is killed."""
        self._looks, self._ends = list(looks), ends
        self.scores: Task | None = None
        """The scoring whose logits are to be kept, where it is one."""
        self.directory: Path | None = None
        """Where a training that ends well leaves a file of weights."""
        self.ended = False
        self.kills = 0
        self._left = MOST_LOOKS
        self.sentinels = [_READY]

    def wrapped_as(self, strategy: str) -> FakeRun:
        """Where it says anything of a training, it says first how the model is held, as ranks do."""
        if any(isinstance(event, SAID_WHILE_TRAINING) for look in self._looks for event in look):
            self._looks[0] = [WrapEvent(strategy=strategy), *self._looks[0]]
        return self

    @property
    def alive(self) -> bool:
        return not self.ended and not self.kills

    def new_events(self) -> list[Event]:
        self._left -= 1
        assert self._left, "nobody ends a run that goes on in silence"
        events = list(self._looks.pop(0)) if self._looks and not self.kills else []
        self.ended = bool(self.kills) or (self._ends and not self._looks)
        if self.directory is not None and any(isinstance(event, TrainingEvent) for event in events):
            (self.directory / WEIGHTS).write_bytes(b"weights")
            (self.directory / NE_FILE).write_text(
                str(next(e.best.ne for e in events if isinstance(e, TrainingEvent)))
            )
        log_is_there = self.scores is not None and PreparedLog.is_prepared(Path(self.scores.log_directory))
        if self.scores is not None and log_is_there and any(isinstance(e, ScoreEvent) for e in events):
            self._keep_logits(self.scores)
        return events

    def _keep_logits(self, task: Task) -> None:
        """Leaves logits that are the nearer to the labels, the lower the NE that the network was trained to."""
        assert self.directory is not None
        assert task.score_split is not None
        ne = float((self.directory / NE_FILE).read_text()) if (self.directory / NE_FILE).exists() else 0.9
        label_N = PreparedLog.open(Path(task.log_directory)).split(task.score_split).labels
        logit_N = ((2 * label_N - 1) * (1 - ne)).astype(np.float32)
        np.save(logits_file(self.directory, task.score_split), logit_N)

    def kill(self) -> None:
        self.kills += 1


class FakeLauncher:
    """A `trials.runtime.launcher.AnyLauncher` whose tasks go as a script says."""

    def __init__(self, script: Callable[[Task], FakeRun]) -> None:
        """`script` gives the run of a task."""
        self._script = script
        self.tasks: list[Task] = []
        self.runs: list[FakeRun] = []
        self.most_at_once = 0

    def start(self, task: Task, directory: Path) -> FakeRun:
        run = self._script(task).wrapped_as(task.strategy.name)
        run.directory = directory
        run.scores = task if task.keep_logits else None
        self.tasks.append(task)
        self.runs.append(run)
        self.most_at_once = max(self.most_at_once, len(self.alive))
        return run

    @property
    def alive(self) -> list[FakeRun]:
        return [run for run in self.runs if run.alive]


def quality(ne: float) -> Metrics:
    return Metrics(ne=ne, log_loss=ne, auc=0.7, calibration=1.0, examples=10)


def progress(examples: int) -> Progress:
    return Progress(examples=examples, total_examples=1000, seconds=0.1)


def evaluated(examples: int, ne: float, *, epoch: float = 0.1) -> EvaluationEvent:
    point = CurvePoint(
        examples=examples, epoch=epoch, train_loss=ne, learning_rate=0.1, seconds=0.1, validation=quality(ne)
    )
    return EvaluationEvent(point=point)


def trained(ne: float = 0.9) -> TrainingEvent:
    return TrainingEvent(best=quality(ne), measured=Measurements(step_ms=2.0, peak_memory_bytes=100))


def diverged() -> DivergenceEvent:
    return DivergenceEvent(step=7, loss="nan")


def failed(error: str = "an exception") -> FailureEvent:
    return FailureEvent(error=error)


def killed() -> FailureEvent:
    return FailureEvent(error="killed from outside", killed=True)


def out_of_memory(needed: int = 300, limit: int = 200) -> FailureEvent:
    return FailureEvent(error="out of memory", out_of_memory=True, needed_bytes=needed, limit_bytes=limit)


def scored(split: str, ne: float = 0.95) -> ScoreEvent:
    return ScoreEvent(split=split, metrics=quality(ne))


def well(task: Task) -> FakeRun:
    """A training that comes to an NE of its job's own; a scoring."""
    if task.score_split is not None:
        return FakeRun([scored(task.score_split)])
    ne = 0.7 + int(task.job.fingerprint[:4], 16) / 2**18
    return FakeRun([progress(10)], [evaluated(10, ne), trained(ne)])


def small_log(folder: Path) -> PreparedLog:
    """A log of 600 rows, prepared in a folder: nothing is trained on it."""
    draw = random.Random(0)
    rows = (f"{draw.randint(0, 1)},{draw.random():.3f},{draw.randint(0, 40)}\n" for _ in range(600))
    (folder / "log.csv").write_text("click,price,city\n" + "".join(rows))
    return prepare([folder / "log.csv"], out=folder / "prepared")
