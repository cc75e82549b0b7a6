"""Trains the trials of a study side by side: begun, given up, tried again, taken in, their results shared.

The ledger commits first, then the sampler is told, then other studies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from dhen.values import compact
from search.execution.admission import AdmittedTrial
from search.execution.reduce_events import cut_short
from search.execution.running import Training
from search.execution.scheduler import NOT_NOW, NotNow, Scheduler
from search.run_directory import CHECKPOINTS
from search.samplers.ask_tell import Proposals
from search.samplers.stopping import Judge, first_stop
from search.study.drivers import Sharing
from search.study.parts import StudyParts
from search.study_state import StudyState
from trials.records.job import Job
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

# What decides while a study searches: the sampler, which learns from candidates, and the stopping rule.


class SearchPolicy:
    """The sampler and the stopping rule, if there is one, of a study; both see candidates alone."""

    def __init__(self, proposals: Proposals, rule: Judge | None, state: StudyState) -> None:
        self.proposals, self._rule, self._state = proposals, rule, state
        self._judged = {
            number: len(trial.result.curve)
            for number, trial in state.trials.items()
            if trial.result.outcome is Outcome.INTERRUPTED
        }
        """Number of evaluations of each trial that were judged, also before a Ctrl-C: a training that goes on
        tells them once more, and more is known by then. Of one whose driver was killed that is not known."""

    def stopped(self, record: TrialRecord, before: TrialRecord) -> TrialRecord | None:
        """How a training trial ends if the stopping rule gives it up at an evaluation that is new; else None.

        `before` is the trial as it was at the last look.
        """
        if self._rule is None or record.kind is not TrialKind.CANDIDATE:
            return None
        if len(record.result.curve) == len(before.result.curve):
            return None
        so_far = before.with_result(curve=record.result.curve, technique=record.result.technique)
        trials = [trial for trial in self._state.trials.values() if trial.origin.promoted_from is None]
        judged = max(len(before.result.curve), self._judged.get(record.number, 0))
        stopped = first_stop(self._rule, so_far, judged, trials)
        self._judged[record.number] = max(judged, len((stopped or so_far).result.curve))
        return stopped


LOG = logging.getLogger(__name__)
ASK_AGAIN_SECONDS = 5.0
"""Seconds after which a driver that had nothing to propose looks again though nothing has changed: the study's
time may be over."""


class TrialRunner:
    """Runs the trials of one study, in each of its stages."""

    def __init__(self, parts: StudyParts, sharing: Sharing | None = None) -> None:
        """The runner of one study; `sharing` is this driver's share in it, None if it is the only one."""
        self.sharing = sharing
        self._ledger, self._state, self._trainer = parts.ledger, parts.state, parts.trainer
        self._admission, self._budget, self._side_by_side = parts.admission, parts.budget, parts.side_by_side
        self._weights, self._warm_start = parts.weights, parts.warm_start
        latest_first = sorted(self._state.trials.items(), reverse=True)
        self._known = {
            trial.job.fingerprint: trial
            for _, trial in latest_first
            if trial.result.outcome.holds_for_equal_jobs
        }
        self._scheduler = Scheduler[Training](self._side_by_side, ranks=self._trainer.ranks_at_once)
        self._training: set[str] = set()
        """Fingerprints of the jobs that train now."""
        self._cut = set[int]()
        """Numbers of the trainings whose processes were ended because their time is over."""
        self._waiting: list[tuple[TrialRecord, Job]] = []
        """Trials that wait for the result of an equal job, which trains now."""
        self._decisions: SearchPolicy | None = None
        self.fruitless = 0
        """Number of trials in a row that needed no training."""

    def train(self, upcoming: Iterator[AdmittedTrial], decisions: SearchPolicy | None = None) -> None:
        """Trains the trials that come up; a trial is made when it can start.

        `decisions` has the sampler and the stopping rule, while the study searches; without it selection is
        frozen, and results of other studies do not count, since weights are wanted.
        """
        self._decisions = decisions

        def begin() -> Iterator[Training | None]:
            for record, job in upcoming:
                self.fruitless += 1
                yield self._place(record, job)

        # waiting ones count, or a sampler could propose equal ones without end
        self._run(begin(), lambda: len(self._waiting) < self._side_by_side)

    def train_in_turns(
        self,
        upcoming: Callable[[], Iterator[AdmittedTrial]],
        decisions: SearchPolicy,
        awaited: Callable[[TrialRecord], bool] = lambda trial: True,
    ) -> None:
        """Trains the trials that come up while the study searches, shared with its other drivers.

        Args:
            upcoming: makes the trials as of now; if the study is shared it is asked at each turn, for the first
                of them.
            decisions: the sampler and the stopping rule.
            awaited: says which of the trials that other drivers run have to end before this returns.
        """
        if self.sharing is None:
            self.train(upcoming(), decisions)
            return
        self._decisions = decisions
        # what waits for another driver's training can only be begun if this driver is asked for more
        self._run(self._begin_in_turns(self.sharing, upcoming, awaited), lambda: True)

    def take_in(self, record: TrialRecord) -> None:
        """Takes in a trial that has ended: equal jobs share its result, weights that nobody wants are dropped."""
        record = compact(record)
        self.note(record)
        LOG.info("trial %d: %s%s", record.number, record.result.outcome, _why(record))
        if self._decisions is not None:
            self._decisions.proposals.tell(record)
        self.know(record)
        if self._decisions is None:
            for trial in list(self._state.trials.values()):  # they share a result that was trained again
                if trial.origin.reused_from == record.number:
                    self.note(_shared(trial, record))
        self._weights.keep(record)
        if self._decisions is not None:
            self._weights.drop({training.record.number for training in self._scheduler.running})
        self._state.ended.append(record.number)

    def note(self, record: TrialRecord) -> None:
        """Commits a trial that is new or has changed."""
        # the ledger first: whatever others are told must be there after a crash
        self._ledger.save(record)
        self._state.note(record)

    def break_off(self, *, resumable: bool) -> None:
        """Notes an interruption, whose processes are gone, in the ledger, if that can be relied on."""
        if self.sharing is not None:
            self.sharing.lose_patience()
        if resumable:
            for training in self._scheduler.running:
                # an attempt may have ended before the interruption: the trial is cut short in its next one
                self.note(cut_short(self._next_attempt(training) or training.record))
            # trials that wait, and what the interruption found between its first commit and its place among the
            # running ones, or between that place and its last commit: only the ledger has all of them
            mine = self._ledger.running() if self.sharing is None else self.sharing.running()
            for record in mine:
                self.note(cut_short(record))

    def _run(self, upcoming: Iterator[Training | NotNow | None], has_room: Callable[[], bool]) -> None:
        self._training.clear()
        self._scheduler.run(
            upcoming, self._ended, on_events=self._on_events, on_poll=self._on_poll, has_room=has_room
        )

    def _on_events(self, activity: Training) -> bool:
        """Takes in a curve that has grown; says whether the stopping rule gives the trial up."""
        record, before = activity.record, self._state.trials[activity.record.number]
        if activity.progress is not None:
            self._state.progress[record.number] = activity.progress
        for notice in activity.take_notices():
            self._state.say(f"trial {record.number}: {notice}")
        stopped = self._decisions.stopped(record, before) if self._decisions is not None else None
        if stopped is not None:
            activity.stop(stopped)
            return True
        trains = not activity.run.ended and record.result.outcome is Outcome.RUNNING
        if self._decisions is not None and trains and self._budget.cuts_short(record):
            activity.run.kill()
            self._cut.add(record.number)
            return True
        if not activity.run.ended and record is not before:
            self._state.note(record)
            if self._decisions is not None:
                self._decisions.proposals.note(record)
        return False

    def _ended(self, activity: Training) -> Iterator[Training]:
        """Begins the trial's next attempt, or takes it in; then what has waited for it need not wait."""
        record = activity.record
        self._state.progress.pop(record.number, None)
        if record.number in self._cut:
            # its checkpoint stays, from which it goes on if the study gets more minutes; what waits for its
            # result is cut short too
            self._cut.discard(record.number)
            self._training.discard(record.job.fingerprint)
            waiting = [pair for pair in self._waiting if pair[0].job.fingerprint == record.job.fingerprint]
            for trial in (record, *(trial for trial, _ in waiting)):
                LOG.info("trial %d: cut short, for its time is over", trial.number)
                self.note(cut_short(trial))
            self._waiting = [pair for pair in self._waiting if pair not in waiting]
            return
        next_record = self._next_attempt(activity)
        if next_record is not None:
            LOG.info(
                "trial %d: %s%s, and is tried again", next_record.number, record.result.outcome, _why(record)
            )
            self.note(next_record)
            yield self._start(next_record, activity.job)
            return
        self._training.discard(record.job.fingerprint)
        self.take_in(self._admission.execution.ended(record, activity.job))
        yield from self._begin_waiting(record.job.fingerprint)

    def _on_poll(self) -> None:
        """Calls all observers, and takes in what other drivers have done."""
        if self.sharing is not None:
            self.sharing.sync()
        self._state.tell()

    def _begin_in_turns(
        self,
        sharing: Sharing,
        upcoming: Callable[[], Iterator[AdmittedTrial]],
        awaited: Callable[[TrialRecord], bool],
    ) -> Iterator[Training | NotNow | None]:
        """Begins, at each of this driver's turns, the first of the trials that come up."""
        # the state's count of changes, and the time, as there was nothing to propose
        changes, asked_at = -1, 0.0
        while True:
            for record, _ in list(self._waiting):
                if record.job.fingerprint not in self._training and not self._trains_elsewhere(record):
                    yield from self._begin_waiting(record.job.fingerprint)
            nothing_new = changes == self._state.changes and time.monotonic() < asked_at + ASK_AGAIN_SECONDS
            if nothing_new or len(self._waiting) >= self._side_by_side:
                yield NOT_NOW
                continue
            begun: Training | NotNow | None = NOT_NOW
            with sharing.turn() as mine:
                if mine and sharing.led_elsewhere:
                    return
                admitted = next(upcoming(), None) if mine else None
                if admitted is not None:
                    self.fruitless += 1
                    # committed before the turn is another driver's
                    begun = self._place(*admitted)
                elif mine:
                    changes, asked_at = self._state.changes, time.monotonic()
                    elsewhere = (self._state.trials[number] for number in sharing.run_elsewhere)
                    if not self._waiting and not any(map(awaited, elsewhere)):
                        return
            yield begun

    def know(self, record: TrialRecord) -> None:
        """Takes in a result that equal jobs share, whichever driver has trained it."""
        if record.result.outcome.holds_for_equal_jobs:
            self._known.setdefault(record.job.fingerprint, record)

    def _trains_elsewhere(self, record: TrialRecord) -> bool:
        """Whether another driver runs a trial of an equal job that began earlier: of two that wait for each other
        one has to begin."""
        if self.sharing is None:
            return False
        here = {training.record.number for training in self._scheduler.running}
        here |= {waiting.number for waiting, _ in self._waiting}
        return any(
            trial.job.fingerprint == record.job.fingerprint and trial.number not in here
            for trial in map(self._state.trials.__getitem__, self._state.unfinished)
            if trial.number < record.number and trial.result.outcome is Outcome.RUNNING
        )

    def _place(self, record: TrialRecord, job: Job | None) -> Training | None:
        """Begins a new job; an equal job's result is shared, and waited for if that job still trains."""
        trained = self._known.get(record.job.fingerprint)
        # other studies' results do not count once selection is frozen, nor for what is trained for its weights
        searches = self._decisions is not None and not record.attempts
        takes_over = searches and not record.origin.trained_for_weights
        if job is None:
            self.take_in(record)
        elif trained is not None and trained.owner != record.number:
            self.take_in(_shared(record, trained))
        elif takes_over and (result := self._warm_start.result(record)) is not None:
            self.take_in(result)
            self.fruitless = 0
        else:
            self.note(record)
            if job.fingerprint not in self._training and not self._trains_elsewhere(record):
                self.fruitless = 0
                self._training.add(job.fingerprint)
                if record.attempts and record.attempts[-1].lost_its_driver:
                    checkpoints = self._trainer.folder(record) / CHECKPOINTS
                    there = checkpoints.is_dir() and any(checkpoints.iterdir())
                    start = (
                        "its checkpoint" if there else f"its start: no checkpoint of it is in {checkpoints}"
                    )
                    self._state.say(f"trial {record.number} goes on here, from {start}")
                return self._start(record, job)
            self._waiting.append((record, job))
        return None

    def _start(self, record: TrialRecord, job: Job) -> Training:
        """Starts a training, which has a limited time while the study searches."""
        seconds = self._budget.seconds_left(record) if self._decisions is not None else None
        return self._trainer.start(record, job, seconds=seconds)

    def _begin_waiting(self, fingerprint: str) -> Iterator[Training]:
        """Places the trials that have waited for this job; if one of them trains it now, the others wait on."""
        for waiting in [pair for pair in self._waiting if pair[0].job.fingerprint == fingerprint]:
            if fingerprint not in self._training:
                # before the trial ends: what waits at an interruption is noted as cut short
                self._waiting.remove(waiting)
                training = self._place(*waiting)
                if training is not None:
                    yield training

    def _next_attempt(self, training: Training) -> TrialRecord | None:
        """The trial as it begins its next attempt; None if the last may not be followed by another."""
        record = training.record
        if not record.result.outcome.may_be_tried_again:
            return None
        return self._admission.next_attempt(record, training.job)


def _shared(record: TrialRecord, trained: TrialRecord) -> TrialRecord:
    """A trial whose job has been trained already, with the result and plan of that training."""
    return record.with_result_of(trained, reused_from=trained.owner).replace(plan=trained.plan)


def _why(record: TrialRecord) -> str:
    return f" ({record.result.error})" if record.result.error else ""
