"""The trials of a study that train, side by side: begun when there is room, stopped, tried again, taken in.

The ledger commits first, then the sampler is told, then other studies.
"""

from __future__ import annotations

from collections.abc import Iterator

from search.execution.reduce_events import cut_short
from search.execution.running import Training, look
from search.planning.admission import Upcoming
from search.samplers.ask_tell import Proposals
from search.stopping.rule import Rule, first_stop
from search.study.parts import Parts
from trials.events import Progress
from trials.job import Job
from trials.processes.launcher import POLL_SECONDS
from trials.record import Outcome, TrialKind, TrialRecord

AGAIN = (Outcome.OUT_OF_MEMORY, Outcome.INTERRUPTED)
"""Ends of an attempt after which there may be another."""

SHARED = (Outcome.COMPLETED, Outcome.STOPPED)
"""Ends that hold for an equal network too."""


class Trainings:
    """Of one study."""

    def __init__(self, parts: Parts, proposals: Proposals, stopping: Rule) -> None:
        self._parts, self._proposals, self._stopping = parts, proposals, stopping
        self._standing, self._news = parts.standing, parts.news
        latest_first = sorted(self._standing.trials.items(), reverse=True)
        self._known = {trial.fingerprint: trial for _, trial in latest_first if trial.outcome in SHARED}
        self._running: dict[int, Training] = {}
        self._waiting: list[tuple[TrialRecord, Job]] = []
        self.deciding = True
        """Whether sampler and stopping rule see what happens, and results of other studies count."""
        self.fruitless = 0
        """Trials in a row that needed no training."""

    @property
    def progress(self) -> dict[int, Progress]:
        """What the trainings that run last said, by trial."""
        return {number: t.progress for number, t in self._running.items() if t.progress is not None}

    def train(self, upcoming: Iterator[Upcoming]) -> None:
        """Works off what comes up, side by side as far as there is room; a trial is made when it can start."""
        while True:
            room = max(len(self._running), len(self._waiting)) < self._parts.parallel
            trial = next(upcoming, None) if room else None
            if trial is not None:
                self._place(*trial)
            elif not self._running:
                return
            self._look(0.0 if trial is not None else POLL_SECONDS)

    def end(self, record: TrialRecord) -> None:
        """Takes in a trial that has ended: its equals share its result, weights that nobody wants are dropped."""
        self.note(record)
        if record.kind is TrialKind.CANDIDATE and self.deciding:
            self._proposals.tell(record)
        if record.outcome in SHARED:
            self._known.setdefault(record.fingerprint, record)
        self._parts.elsewhere.publish(record)
        for twin in [] if self.deciding else list(self._standing.trials.values()):
            if twin.reused_from == record.number:
                self.note(_reused(twin, record).replace(test=None))
        self._parts.weights.keep(record)
        if self.deciding:
            self._parts.weights.drop(self._running)
        self._news.ended.append(record.number)

    def note(self, record: TrialRecord) -> None:
        """Takes in a trial that is new or has changed."""
        self._parts.ledger.save(record)
        self._standing.note(record)
        self._news.changes += 1

    def break_off(self, *, resumable: bool) -> None:
        """Ends what runs; the ledger hears of it where it can be relied on."""
        for training in self._running.values():
            training.run.kill()
        if resumable:
            going = [training.record for training in self._running.values()]
            for record in going + [record for record, _ in self._waiting]:
                self.note(cut_short(record))

    def _place(self, record: TrialRecord, job: Job | None) -> None:
        """Trains what is new; an equal network's result is shared, and waited for where it still trains."""
        self.fruitless += 1
        known = self._known.get(record.fingerprint)
        if job is None:
            self.end(record)
        elif known is not None and known.owner != record.number:
            self.end(_reused(record, known))
        elif (done := self._done_elsewhere(record)) is not None:
            self.end(done)
            self.fruitless = 0
        else:
            self.note(record)
            if any(training.record.fingerprint == job.fingerprint for training in self._running.values()):
                self._waiting.append((record, job))
            else:
                self._running[record.number] = self._parts.trainer.start(record, job)
                self.fruitless = 0

    def _look(self, seconds: float) -> None:
        """Takes in what the trainings say; those that have ended make room, and their twins need not wait."""
        for training in look(list(self._running.values()), seconds):
            record = training.record
            stopped = self._stopped(training)
            if stopped is None and not training.run.ended:
                if record is not self._standing.trials[record.number]:
                    self._standing.note(record)
                    self._news.changes += 1
                    if record.kind is TrialKind.CANDIDATE:
                        self._proposals.note(record)
                continue
            del self._running[record.number]
            if stopped is None and record.outcome in AGAIN and self._try_again(record, training.job):
                continue
            self.end(stopped or record)
            waiting, self._waiting = self._waiting, []
            for twin, job in waiting:
                self._place(twin, job)
        self._news.tell()

    def _stopped(self, training: Training) -> TrialRecord | None:
        """How it ends where the stopping rule gives it up at an evaluation that is new; then it has been ended."""
        record, before = training.record, self._standing.trials[training.record.number]
        if record.kind is not TrialKind.CANDIDATE or not self.deciding:
            return None
        news = {"curve": record.curve, "executed_technique": record.executed_technique}
        trials = [trial for trial in self._standing.trials.values() if trial.promoted_from is None]
        stopped = first_stop(self._stopping, before.replace(**news), len(before.curve), trials)
        return training.stop(stopped) if stopped is not None else None

    def _try_again(self, record: TrialRecord, job: Job) -> bool:
        """What ran out of memory goes on with the next strategy, if there is one; what was killed, as it was."""
        again = self._parts.admission.next_attempt(record, job)
        if again is None:
            return False
        self.note(again)
        self._running[record.number] = self._parts.trainer.start(again, job)
        return True

    def _done_elsewhere(self, record: TrialRecord) -> TrialRecord | None:
        """With the result of another study; not once the winners are known, of whom weights are wanted."""
        return self._parts.elsewhere.result(record) if self.deciding else None


def _reused(record: TrialRecord, known: TrialRecord) -> TrialRecord:
    """The record of a trial whose network has been trained already."""
    own = {"number", "kind", "point", "started_at", "test", "sampler_notes", "attempts", "reused_from_study"}
    own |= {"promoted_from", "tuned_from"}
    shared = {name: getattr(known, name) for name in type(known).model_fields if name not in own}
    return record.replace(**(shared | {"reused_from": known.owner, "seconds": 0.0}))
