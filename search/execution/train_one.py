"""One training by itself, as `dhen-search train` wants it, tried again as a study would try it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from search.execution.running import Training
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer
from trials.job import Job
from trials.record import TrialRecord
from trials.strategy import Prefer

OnChange = Callable[[TrialRecord], None]
"""Is called with the record as it grows."""


def train_one(
    record: TrialRecord,
    job: Job,
    trainer: Trainer,
    on_change: OnChange,
    *,
    start_from: Path | None = None,
    prefer: Prefer = "least",
) -> TrialRecord:
    """The record of a finished training; what runs out of memory, or is killed, has its next attempts.

    Ctrl-C ends the processes and goes on up.

    Args:
        record: about to start.
        job: what is trained.
        trainer: starts the processes.
        on_change: sees the record grow.
        start_from: a weights file to begin with in place of fresh weights.
        prefer: of the memory techniques that fit.

    Raises:
        UserError: where this machine lacks what the strategy needs.
    """
    work = _OneTraining(record, job, trainer, on_change, start_from, prefer)
    Scheduler[Training](1).run(work)
    return work.record


class _OneTraining:
    """See `search.execution.scheduler.Work`."""

    def __init__(
        self,
        record: TrialRecord,
        job: Job,
        trainer: Trainer,
        on_change: OnChange,
        start_from: Path | None,
        prefer: Prefer,
    ) -> None:
        self.record, self._job, self._trainer = record, job, trainer
        self._on_change, self._start_from, self._prefer = on_change, start_from, prefer

    def begin(self) -> Iterator[Training]:
        yield self._start(self.record)

    def has_room(self) -> bool:
        return True

    def heard(self, activity: Training) -> bool:
        self._on_change(activity.record)
        return False

    def ended(self, activity: Training) -> Iterable[Training]:
        self.record = activity.record
        again = self._trainer.execution.next_attempt(activity.record, self._job, self._prefer)
        return [] if again is None else [self._start(again)]

    def looked(self) -> None:
        pass

    def _start(self, record: TrialRecord) -> Training:
        return self._trainer.start(record, self._job, start_from=self._start_from)
