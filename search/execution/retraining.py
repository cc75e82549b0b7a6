"""Trains networks again from other seeds, scores them on test where asked, and keeps what is finished.

Several side by side, each in a process of its own, like the study's trials; in their own folder and in the
ledger's own table, so that no reader takes them for candidates. What is done is not done again: the same
command goes on after Ctrl-C or worse.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from search.execution.reduce_events import cut_short
from search.execution.running import Scoring, Training, killed_on_error, look
from search.execution.trainer import CHECKPOINTS, Trainer, new_record
from trials.events import WEIGHTS
from trials.job import Job
from trials.record import Outcome, Retraining, TrialKind, TrialRecord
from trials.storage.ledger import Ledger
from trials.training.score_weights import logits_file

FOLDER = "retrained"
"""Of the run directory: where retrainings leave what trials leave."""
SPLIT = "test"
RESULTS = (Outcome.COMPLETED, Outcome.DIVERGED)
"""Ends that stand; after others the same command tries again."""
Watch = Callable[[Retraining], None]
"""Is told of each retraining that has ended."""


class Wanted(NamedTuple):
    """A job that is to be trained: a trial's network, whole or in part, from a seed."""

    of: TrialRecord
    job: Job
    removed: str | None = None
    """What the network lacks."""


class Retrainings:
    """Those of one study."""

    def __init__(self, ledger: Ledger, trainer: Trainer, *, parallel: int, watch: Watch) -> None:
        """`ledger` is settled; `trainer` works in the study's directory; `parallel` go on side by side."""
        self._ledger, self._parallel, self._watch = ledger, parallel, watch
        self._trainer = trainer.below(FOLDER)
        self._all = {each.number: each for each in ledger.retrainings()}
        self._known = {each.fingerprint: cut_short(each) for each in self._all.values()}
        self._going: list[Training | Scoring] = []
        self._waiting: deque[Wanted] = deque()
        self._scored_again: set[str] = set()

    @property
    def all(self) -> tuple[Retraining, ...]:
        """As the ledger has them."""
        return tuple(self._all[number] for number in sorted(self._all))

    def run(self, wanted: Iterable[Wanted], *, score: bool) -> dict[str, Retraining]:
        """Records of those that completed, by fingerprint of their job; equal jobs are trained once.

        `score`: on the test split too, and each look is counted; their logits are kept (`logits`).
        Ctrl-C ends the processes and goes on up.

        Raises:
            UserError: where one cannot be scored, or this machine lacks what its strategy needs.
        """
        unique = {each.job.fingerprint: each for each in wanted}
        self._waiting = deque(each for each in unique.values() if not self._is_done(each.job, score))
        with killed_on_error(self._going):
            while self._waiting or self._going:
                while self._waiting and len(self._going) < self._parallel:
                    self._going.append(self._begin(self._waiting.popleft()))
                for activity in look(self._going):
                    if activity.run.ended:
                        self._going.remove(activity)
                        self._end(activity, unique[activity.job.fingerprint], score)
        ended = {name: self._known[name] for name in unique}
        return {name: each for name, each in ended.items() if each.outcome is Outcome.COMPLETED}

    def failures(self, wanted: Iterable[Wanted]) -> list[str]:
        """What became of those that ran and did not complete, in words."""
        ended = [self._known[name] for name in {each.job.fingerprint: None for each in wanted}]
        bad = [each for each in ended if each.outcome is not Outcome.COMPLETED]
        return [f"trial {each.of} with seed {each.seed}: {each.outcome}, {each.error}" for each in bad]

    def logits(self, record: Retraining) -> Path:
        """The file of its logits on test."""
        return logits_file(self._trainer.folder(record.number), SPLIT)

    def _is_done(self, job: Job, score: bool) -> bool:
        record = self._known.get(job.fingerprint)
        if record is None or record.outcome is not Outcome.COMPLETED:
            return record is not None and record.outcome in RESULTS
        return not score or (record.test is not None and self.logits(record).exists())

    def _begin(self, wanted: Wanted) -> Training | Scoring:
        """What is next for it: it is scored where its weights are there, else trained."""
        record = self._known.get(wanted.job.fingerprint)
        if record is not None and record.outcome is Outcome.COMPLETED and self._weights(record).exists():
            self._ledger.count_test_look(wanted.of.number)
            return self._trainer.start_scoring(record, wanted.job, SPLIT, keep_logits=True)
        fresh = self._fresh(wanted, record)
        self._keep(fresh)
        return self._trainer.start(fresh, wanted.job)

    def _fresh(self, wanted: Wanted, known: Retraining | None) -> Retraining:
        """About to start, with the technique that the trial was trained with: that is known to fit."""
        number = len(self._all) if known is None else known.number
        record = new_record(number, TrialKind.RETRAINING, {}, wanted.job)
        return Retraining(
            **dict(record)
            | {
                "planned_technique": wanted.of.executed_technique or wanted.of.planned_technique,
                "attempts": known.attempts if known is not None else (),
            },
            of=wanted.of.number,
            seed=wanted.job.seed,
            removed=wanted.removed,
        )

    def _end(self, activity: Training | Scoring, wanted: Wanted, score: bool) -> None:
        record = activity.record
        assert isinstance(record, Retraining)
        if isinstance(activity, Scoring):
            if activity.killed and record.fingerprint not in self._scored_again:
                self._scored_again.add(record.fingerprint)
                self._waiting.appendleft(wanted)
                return
            record = record.replace(test=activity.metrics)
        self._keep(record)
        folder = self._trainer.folder(record.number)
        if record.outcome is Outcome.INTERRUPTED or (
            score and record.outcome is Outcome.COMPLETED and record.test is None
        ):
            self._waiting.appendleft(wanted)
            return
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        if record.test is not None or record.removed is not None:
            self._weights(record).unlink(missing_ok=True)  # what is told of it needs them no more
        self._watch(record)

    def _weights(self, record: Retraining) -> Path:
        return self._trainer.folder(record.number) / WEIGHTS

    def _keep(self, record: Retraining) -> None:
        self._ledger.save_retraining(record)
        self._all[record.number] = record
        self._known[record.fingerprint] = record
