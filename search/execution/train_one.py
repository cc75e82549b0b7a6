"""One training by itself, as `dhen-search train` wants it, tried again as a study would try it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from search.execution.running import Training
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer
from trials.job import Job
from trials.record import TrialRecord

OnChange = Callable[[TrialRecord], None]
"""A function that is called with the record as it grows."""


def train_one(
    record: TrialRecord,
    job: Job,
    trainer: Trainer,
    on_change: OnChange,
    *,
    start_from: Path | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> TrialRecord:
    """The record of a finished training; one that runs out of memory, or is killed, has its next attempts.

    Ctrl-C ends the processes and is raised again.

    Args:
        record: the record of a trial that is about to start.
        job: the job that is trained.
        trainer: starts the processes.
        on_change: is called as the record grows.
        start_from: a weights file to begin with in place of fresh weights.
        say: is called with sentences for people, such as on a rank that is slow.

    Raises:
        UserError: where this machine lacks what the strategy needs.
    """
    work = _OneTraining(record, job, trainer, on_change, start_from, say)
    Scheduler[Training](1).run(work)
    return work.record


class _OneTraining:
    """The `search.execution.scheduler.Work` of one training."""

    def __init__(
        self,
        record: TrialRecord,
        job: Job,
        trainer: Trainer,
        on_change: OnChange,
        start_from: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self.record, self._job, self._trainer = record, job, trainer
        self._on_change, self._start_from, self._say = on_change, start_from, say

    def begin(self) -> Iterator[Training]:
        yield self._start(self.record)

    def has_room(self) -> bool:
        return True

    def heard(self, activity: Training) -> bool:
        self._on_change(activity.record)
        for notice in activity.take_notices():
            self._say(notice)
        return False

    def ended(self, activity: Training) -> Iterable[Training]:
        record = self._trainer.execution.next_attempt(activity.record, self._job)
        if record is None:
            self.record = self._trainer.execution.ended(activity.record, self._job)
            return []
        self.record = activity.record
        return [self._start(record)]

    def looked(self) -> None:
        pass

    def _start(self, record: TrialRecord) -> Training:
        return self._trainer.start(record, self._job, start_from=self._start_from)
