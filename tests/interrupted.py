"""Trainings that are broken off at a number of examples, and what they said and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trials.data.prepared_log import PreparedLog
from trials.records.events import EvaluationEvent, Event, Progress, TrainingEvent
from trials.records.job import Job
from trials.store.weights import Weights
from trials.training.loop import train


class Interrupted(Exception):  # noqa: N818
    """Ends a training as nothing inside it does."""


class Told:
    """What a training said and kept; raises or does something else at a number of examples."""

    def __init__(self, at: float = math.inf, then: Callable[[], None] | None = None) -> None:
        self.points: list[dict[str, Any]] = []
        self.best: float | None = None
        self.weights: Weights = {}
        self._at, self._then = at, then

    def __call__(self, event: Event) -> None:
        if isinstance(event, EvaluationEvent):
            point = event.point.to_dict()
            del point["seconds"]
            self.points.append(point)
        if isinstance(event, TrainingEvent):
            self.best = event.best.ne
        if isinstance(event, Progress) and event.examples >= self._at:
            if self._then is not None:
                self._then()
            raise Interrupted

    @property
    def answer(self) -> dict[str, Any]:
        sums = {name: float(w.double().abs().sum()) for name, w in self.weights.items()}
        return {"points": self.points, "best": self.best, "weights": sums}


def run(job: Job, log: PreparedLog, told: Told, folder: Path | None, **more: Any) -> Told:
    """With checkpoints at every evaluation, and whenever losses are looked at."""
    train(
        job,
        log,
        told,
        keep=told.weights.update,
        progress_seconds=0.0,
        resume_from=folder,
        checkpoint_seconds=0.0,
        **more,
    )
    return told


def broken_off(job: Job, log: PreparedLog, folder: Path, at: int, **more: Any) -> None:
    """A training that ends after so many examples, and leaves its checkpoints."""
    try:
        run(job, log, Told(at=at), folder, **more)
    except Interrupted:
        return
    raise AssertionError("it came to its own end")
