"""Trains a job as a study does, with the time of every single step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.training.peers.contest import Lap
from search.execution.train_list import train_one
from search.execution.trainer import Trainer, new_record
from trials.records.events import EVENTS, EvaluationEvent, Event, EventReader, Progress
from trials.records.job import Job
from trials.records.task import Task
from trials.records.trial_record import Outcome, TrialKind, TrialRecord


class StepTrainer(Trainer):
    """Its training processes tell of every step, in place of twice a second."""

    def _task(self, job: Job, **fields: Any) -> Task:
        return super()._task(job, **fields, progress_seconds=0.0)


def train_timed(trainer: StepTrainer, job: Job) -> tuple[TrialRecord, list[list[Lap]]]:
    """A finished training and its laps, a list for each stretch between evaluations.

    A training that did not end well is returned as such: its record says why.
    """
    record = new_record(0, TrialKind.CANDIDATE, {}, job)
    record = train_one(record, job, trainer, lambda _: None)
    stretches = laps(EventReader(trainer.folder(record) / EVENTS)())
    batch = job.training.batch_size
    assert all(n == batch for laps in stretches for n, _ in laps)
    return record, stretches


def laps(events: Iterable[Event]) -> list[list[Lap]]:
    """The steps that a training's events tell of."""
    stretches: list[list[Lap]] = [[]]
    examples, seconds = 0, 0.0
    for event in events:
        if isinstance(event, Progress):
            stretches[-1].append((event.examples - examples, event.seconds - seconds))
            examples, seconds = event.examples, event.seconds
        elif isinstance(event, EvaluationEvent):
            seconds = event.point.seconds
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def completed(record: TrialRecord) -> bool:
    """Whether it ended well."""
    return record.result.outcome is Outcome.COMPLETED
