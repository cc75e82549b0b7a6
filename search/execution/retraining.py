"""Trains networks again from other seeds, scores them on test if asked, and keeps what is finished.

Several retrainings go on side by side, each in processes of its own, like the study's trials. They have a
folder and a table of the ledger to themselves, so that no reader takes them for candidates. What is done is
not done again: the same command goes on after Ctrl-C or worse.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from search.execution.reduce_events import cut_short
from search.execution.running import Scoring, Training
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer, new_record
from search.run_directory import CHECKPOINTS
from trials.records.events import WEIGHTS, Progress, logits_file
from trials.records.job import Job
from trials.records.trial_record import Metrics, Outcome, TrialKind, TrialRecord
from trials.store.ledger import Ledger

SPLIT = "test"
HasTimeFor = Callable[["RetrainingRequest"], bool]
"""A function that says of each retraining, as its place is free, whether there is time for it; the first for which
there is none is the last that is asked for."""


class Watcher(NamedTuple):
    """Functions that are told how far retrainings are, for those who wait for them."""

    changed: Callable[[TrialRecord, bool], None] = lambda record, ended: None
    """Is called with each retraining that has begun or changed, and whether it has ended."""
    wanted: Callable[[int, int], None] = lambda total, done: None
    """Is called with the number of retrainings that are asked for, and how many of these are done already."""
    progress: Callable[[TrialRecord, Progress], None] = lambda record, progress: None
    """Is called with what a retraining that goes on has reached."""
    on_poll: Callable[[], None] = lambda: None
    """Is called about ten times per second while any goes on."""
    say: Callable[[str], None] = lambda sentence: None
    """Is called with sentences for people, such as on a rank that is slow."""


class RetrainingRequest(NamedTuple):
    """A job that is to be trained: a trial's network, whole or in part, from a seed, perhaps at an origin."""

    of: TrialRecord
    job: Job
    removed: str | None = None
    """The part that the network lacks."""


class Retrainings:
    """The retrainings of one study."""

    def __init__(
        self,
        ledger: Ledger,
        trainer: Trainer,
        *,
        side_by_side: int,
        watcher: Watcher,
    ) -> None:
        """Retrainings that the ledger has, and those to come.

        Args:
            ledger: the study's ledger, settled.
            trainer: a trainer that works in the study's directory.
            side_by_side: number of retrainings at the same time.
            watcher: receives their progress.
        """
        self.watcher = watcher
        self._ledger, self._trainer, self._side_by_side = ledger, trainer, side_by_side
        self._records: dict[str, TrialRecord] = {}
        self.read_again()

    def read_again(self) -> list[TrialRecord]:
        """Takes over the retrainings that the ledger has, by number; none of them goes on by now."""
        records = [cut_short(record) for record in self._ledger.retrainings()]
        self._records = {record.job.fingerprint: record for record in records}
        return records

    def run(
        self,
        wanted: Iterable[RetrainingRequest],
        *,
        score: str | None = None,
        weights: bool = False,
        has_time_for: HasTimeFor | None = None,
    ) -> dict[str, TrialRecord]:
        """Records of the retrainings that completed, by fingerprint of their job; equal jobs are trained once.

        Ctrl-C ends the processes and is raised again.

        Args:
            wanted: jobs to be trained, if that is not done.
            score: the split to score on too, whose logits are kept (`logits`); each look at test is counted.
            weights: whether the weights must still be there, or the job is trained again.
            has_time_for: is asked before each begins, if there may be too little time for all.

        Raises:
            UserError: if a network cannot be scored, or this machine lacks what its strategy needs.
        """
        unique = {request.job.fingerprint: request for request in wanted}
        missing = self.missing(unique.values(), score=score, weights=weights)
        if missing:
            self.watcher.wanted(len(unique), len(unique) - len(missing))
        requests = {request.job.fingerprint: request for request in missing}
        scored_again: set[str] = set()

        def begin() -> Iterator[Training | Scoring]:
            """Scores a job's network if its weights are there and that is wanted, else trains it."""
            for request in missing:
                if has_time_for is not None and not has_time_for(request):
                    return
                record = self._records.get(request.job.fingerprint)
                completed = record is not None and record.result.outcome is Outcome.COMPLETED
                if record is not None and completed and score is not None and self._weights(record).exists():
                    yield start_scoring(record, request)
                else:
                    fresh = self._fresh(request, record)
                    self._keep(fresh, ended=False)
                    yield self._trainer.start(fresh, request.job)

        def start_scoring(record: TrialRecord, request: RetrainingRequest) -> Scoring:
            assert score is not None
            if score == SPLIT:  # a look at test is counted first
                self._ledger.count_test_look(request.of.number)
            return self._trainer.start_scoring(record, request.job, score, keep_logits=True)

        def on_events(activity: Training | Scoring) -> bool:
            if isinstance(activity, Training):
                if activity.progress is not None and not activity.run.ended:
                    self.watcher.progress(activity.record, activity.progress)
                for notice in activity.take_notices():
                    self.watcher.say(f"retraining {activity.record.number}: {notice}")
            return False

        def ended(activity: Training | Scoring) -> Iterable[Training | Scoring]:
            record, name = activity.record, activity.job.fingerprint
            if isinstance(activity, Training):
                next_attempt = self._trainer.execution.next_attempt(record, activity.job)
                if next_attempt is not None:
                    self._keep(next_attempt, ended=False)
                    return [self._trainer.start(next_attempt, activity.job)]
                record = self._trainer.execution.ended(record, activity.job)
                if score is not None and record.result.outcome is Outcome.COMPLETED:
                    self._keep(record, ended=False)
                    return [start_scoring(record, requests[name])]
            elif activity.killed and name not in scored_again:
                scored_again.add(name)
                return [start_scoring(record, requests[name])]
            else:
                metrics = activity.metrics  # raises an error if there are none
                record = record.with_result(test=metrics) if score == SPLIT else record
            self._keep(record, ended=True)
            return []

        scheduler = Scheduler[Training | Scoring](self._side_by_side, ranks=self._trainer.ranks_at_once)
        scheduler.run(begin(), ended, on_events=on_events, on_poll=self.watcher.on_poll)
        return self.completed(unique.values())

    def completed(
        self, wanted: Iterable[RetrainingRequest], *, weights: bool = False
    ) -> dict[str, TrialRecord]:
        """Returns the records of the retrainings that completed, by fingerprint of their job; with `weights` of
        those whose weights are still there."""
        ended = (
            (request.job, self._records[request.job.fingerprint])
            for request in wanted
            if request.job.fingerprint in self._records
        )
        return {
            job.fingerprint: record
            for job, record in ended
            if record.result.outcome is Outcome.COMPLETED and self._is_done(job, None, weights)
        }

    def missing(
        self, wanted: Iterable[RetrainingRequest], *, score: str | None = None, weights: bool = False
    ) -> list[RetrainingRequest]:
        """What `run` would still have to train or to score; each job once."""
        unique = {request.job.fingerprint: request for request in wanted}
        return [request for request in unique.values() if not self._is_done(request.job, score, weights)]

    def failures(self, wanted: Iterable[RetrainingRequest]) -> list[str]:
        """Sentences on the retrainings that ran and did not complete."""
        names = {request.job.fingerprint: None for request in wanted}
        ended = [self._records[name] for name in names if name in self._records]
        incomplete = [record for record in ended if record.result.outcome is not Outcome.COMPLETED]
        return [
            f"trial {record.origin.of} with seed {record.job.seed}: {record.result.outcome}, {record.result.error}"
            for record in incomplete
        ]

    def logits(self, record: TrialRecord, split: str = SPLIT) -> Path:
        """The file of a retraining's logits on a split that it was scored on."""
        return logits_file(self._trainer.folder(record), split)

    def _keep(self, record: TrialRecord, *, ended: bool) -> None:
        """Commits a retraining, and lets go of files that nothing needs any more once it has ended."""
        self._ledger.save_retraining(record)
        self._records[record.job.fingerprint] = record
        if ended:
            shutil.rmtree(self._trainer.folder(record) / CHECKPOINTS, ignore_errors=True)
            scored_there = record.job.origin is not None
            if record.result.test is not None or record.origin.removed is not None or scored_there:
                self._weights(record).unlink(missing_ok=True)  # what is said of it needs them no more
        self.watcher.changed(record, ended)

    def _is_done(self, job: Job, score: str | None, weights: bool) -> bool:
        record = self._records.get(job.fingerprint)
        if record is None or record.result.outcome is not Outcome.COMPLETED:
            return record is not None and record.result.outcome.is_final
        scored = score is None or self.logits(record, score).exists()
        if score == SPLIT:
            scored = scored and record.result.test is not None
        return scored and (not weights or self._weights(record).exists())

    def _fresh(self, request: RetrainingRequest, earlier: TrialRecord | None) -> TrialRecord:
        """A retraining about to start, with the strategy that its trial was trained with, which is known to
        fit; a part with fewer layers, in a pipeline of as many stages at most."""
        number = len(self._records) if earlier is None else earlier.number
        trial = request.of
        record = new_record(
            number,
            TrialKind.RETRAINING,
            {},
            request.job,
            of=trial.number,
            removed=request.removed,
        )
        technique = self._trainer.execution.held_as(trial, request.job)
        ms = trial.plan.serving_ms if request.removed is None else None
        record = record.with_plan(technique=technique, ranks=trial.plan.ranks, serving_ms=ms)
        return record.replace(attempts=earlier.attempts if earlier else ())

    def _weights(self, record: TrialRecord) -> Path:
        return self._trainer.folder(record) / WEIGHTS


# Scores trained networks on a split, several side by side; a scoring that was killed is tried once more.


def score_networks(
    networks: Iterable[tuple[TrialRecord, Job]],
    split: str,
    trainer: Trainer,
    take: Callable[[TrialRecord, Metrics], None],
    *,
    side_by_side: int = 1,
    keep_logits: bool = False,
) -> None:
    """Scores the kept weights of trials on a split.

    Args:
        networks: trials and the jobs that trained them, taken up one by one, as late as there is a place for each.
        split: train, validation or test.
        trainer: starts the processes.
        take: is called with each trial and its metrics, as they come.
        side_by_side: number of scorings at the same time.
        keep_logits: whether logits stay in the trials' folders.

    Raises:
        UserError: if processes end without a result.
    """
    tried_again: set[str] = set()

    def start(record: TrialRecord, job: Job) -> Scoring:
        return trainer.start_scoring(record, job, split, keep_logits=keep_logits)

    def ended(scoring: Scoring) -> Iterable[Scoring]:
        if scoring.killed and scoring.job.fingerprint not in tried_again:
            tried_again.add(scoring.job.fingerprint)
            return [start(scoring.record, scoring.job)]
        take(scoring.record, scoring.metrics)
        return ()

    upcoming = (start(record, job) for record, job in networks)
    Scheduler[Scoring](side_by_side, ranks=trainer.ranks_at_once).run(upcoming, ended)


def score_one(record: TrialRecord, job: Job, split: str, trainer: Trainer) -> Metrics:
    """Metrics of one trial's kept weights on a split.

    Raises:
        UserError: if the processes end without a result.
    """
    results: list[Metrics] = []
    score_networks([(record, job)], split, trainer, lambda _, metrics: results.append(metrics))
    return results[0]
