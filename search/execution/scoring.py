"""Scores trained networks on a split, several side by side; a scoring that was killed is tried once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from search.execution.running import Scoring
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer
from trials.job import Job
from trials.record import Metrics, TrialRecord


class ScoringRequest(NamedTuple):
    """A network that is to be scored, and the job that trained it."""

    record: TrialRecord
    job: Job


def score_networks(
    networks: Iterable[ScoringRequest],
    split: str,
    trainer: Trainer,
    take: Callable[[TrialRecord, Metrics], None],
    *,
    side_by_side: int = 1,
    keep_logits: bool = False,
) -> None:
    """Scores the kept weights of trials on a split.

    Args:
        networks: requests, which are taken up one by one, as late as there is a place for each.
        split: train, validation or test.
        trainer: starts the processes.
        take: is called with each trial and its metrics, as they come.
        side_by_side: number of scorings at the same time.
        keep_logits: whether logits stay in the trials' folders.

    Raises:
        UserError: where processes end without a result.
    """
    work = _ScoringWork(networks, split, trainer, take, keep_logits)
    Scheduler[Scoring](side_by_side, ranks=trainer.ranks_at_once).run(work)


def score_one(record: TrialRecord, job: Job, split: str, trainer: Trainer) -> Metrics:
    """Metrics of one trial's kept weights on a split.

    Raises:
        UserError: where the processes end without a result.
    """
    results: list[Metrics] = []
    score_networks([ScoringRequest(record, job)], split, trainer, lambda _, metrics: results.append(metrics))
    return results[0]


class _ScoringWork:
    """The `search.execution.scheduler.Work` of scoring."""

    def __init__(
        self,
        networks: Iterable[ScoringRequest],
        split: str,
        trainer: Trainer,
        take: Callable[[TrialRecord, Metrics], None],
        keep_logits: bool,
    ) -> None:
        self._networks, self._split, self._trainer = networks, split, trainer
        self._take, self._keep_logits = take, keep_logits
        self._again: set[str] = set()

    def begin(self) -> Iterator[Scoring]:
        for record, job in self._networks:
            yield self._start(record, job)

    def has_room(self) -> bool:
        return True

    def heard(self, activity: Scoring) -> bool:
        return False

    def ended(self, activity: Scoring) -> Iterable[Scoring]:
        record, job = activity.record, activity.job
        if activity.killed and job.fingerprint not in self._again:
            self._again.add(job.fingerprint)
            return [self._start(record, job)]
        self._take(record, activity.metrics)
        return ()

    def looked(self) -> None:
        pass

    def _start(self, record: TrialRecord, job: Job) -> Scoring:
        return self._trainer.start_scoring(record, job, self._split, keep_logits=self._keep_logits)
