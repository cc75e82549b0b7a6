"""Trainings against servers of embedding tables, in processes as a study starts them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small_jobs

from dhen.config import ModelConfig
from dhen.model import parse_model
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event, FailureEvent, TrainingEvent
from trials.records.job import Job
from trials.records.strategy import named
from trials.records.task import Task
from trials.runtime.launcher import Launcher, Run, wait_for
from trials.store.weights import Weights, read_weights

SECONDS = 240
LAYER = {"modules": ["dcn_v2", "dlrm"], "out_embeddings": 3}
MODEL = parse_model(
    {"embedding_dim": 8, "table_dim_exponent": 0.5, "layers": [LAYER], "dropout": 0.0}, "test"
)
"""With tables of several lengths, and so several matrices."""


@dataclass
class Served:
    """What a training left."""

    events: list[Event]
    weights: Weights

    @property
    def ne(self) -> list[float]:
        """NE on validation at each evaluation."""
        return [event.point.validation.ne for event in self.events if event.event == "evaluated"]

    @property
    def trained(self) -> TrainingEvent:
        return next(event for event in self.events if isinstance(event, TrainingEvent))


def a_job(
    log: PreparedLog, tables: dict[str, Any] | None = None, model: ModelConfig = MODEL, **training: Any
) -> Job:
    """With a learning rate that does not amplify rounding."""
    settings: dict[str, Any] = {"epochs": 1, "evaluate_every": 400, "learning_rate": 5e-4, "clip_norm": 0.3}
    settings |= {"embedding_learning_rate": 0.01, "plateau_factor": 1.0, "schedule": "constant"}
    settings |= training | ({"tables": tables} if tables else {})
    return small_jobs.a_job(log, model, **settings)


def a_task(job: Job, log_folder: Path, strategy: str, ranks: int, **fields: Any) -> Task:
    held = named(strategy)
    return Task(
        job=job, log_directory=str(log_folder), threads=1, strategy=held, gpus_per_host=ranks, **fields
    )


def train_on_servers(
    task: Task, folder: Path, meanwhile: Callable[[Run, Sequence[Event]], None] | None = None
) -> Served:
    """Runs a task to its end in a fresh folder, or one whose checkpoints it goes on from."""
    if task.resume_from is None:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    run, events, began = Launcher().start(task, folder), list[Event](), time.monotonic()
    while not run.ended:
        wait_for([run])
        events += run.new_events()
        if meanwhile is not None:
            meanwhile(run, events)
        if time.monotonic() - began > SECONDS:
            run.kill()
            logs = [path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))]
            raise AssertionError("\n".join(logs))
    weights = folder / "weights.safetensors"
    return Served(events, read_weights(weights) if weights.exists() else {})


def failure(served: Served) -> str:
    """Why a training failed."""
    return next(event.error for event in served.events if isinstance(event, FailureEvent))
