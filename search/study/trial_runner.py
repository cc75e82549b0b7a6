"""Trains the trials of a study side by side: begun, given up, tried again, taken in, their results shared.

The ledger commits first, then the sampler is told, then other studies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from search.execution.reduce_events import cut_short
from search.execution.running import Training
from search.execution.scheduler import Scheduler
from search.execution.trainer import Trainer
from search.planning.admission import Admission, AdmittedTrial
from search.reuse.kept_weights import KeptWeights
from search.reuse.result_source import ResultSource
from search.study.decisions import Decisions
from search.study_state import StudyState
from trials.job import Job
from trials.record import Outcome, TrialRecord
from trials.storage.ledger import Ledger

LOG = logging.getLogger(__name__)


class TrialRunner:
    """Runs the trials of one study: `search.execution.scheduler.Work` in each of its stages."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        state: StudyState,
        trainer: Trainer,
        admission: Admission,
        weights: KeptWeights,
        sources: Sequence[ResultSource],
        side_by_side: int,
        cuts_short: Callable[[TrialRecord], bool] = lambda trial: False,
    ) -> None:
        """The runner of one study.

        Args:
            ledger: the study's ledger, which is told of every change first.
            state: state of the study.
            trainer: starts attempts.
            admission: says which attempt follows another.
            weights: keeps and drops what trainings leave.
            sources: where results of other studies are found, and this study's are published.
            side_by_side: number of trials at the same time.
            cuts_short: whether a training of the search has to end, since its time is over.
        """
        self._cuts_short = cuts_short
        self._ledger, self._state, self._trainer, self._admission = ledger, state, trainer, admission
        self._weights, self._sources, self._side_by_side = weights, sources, side_by_side
        latest_first = sorted(state.trials.items(), reverse=True)
        self._known = {
            trial.job.fingerprint: trial
            for _, trial in latest_first
            if trial.result.outcome.holds_for_equal_jobs
        }
        self._scheduler = Scheduler[Training](side_by_side)
        self._training: set[str] = set()
        """Fingerprints of the jobs that train now."""
        self._cut = set[int]()
        """Numbers of the trainings whose processes were ended because their time is over."""
        self._waiting: list[tuple[TrialRecord, Job]] = []
        """Trials that wait for the result of an equal job, which trains now."""
        self._upcoming: Iterator[AdmittedTrial] = iter(())
        self._decisions: Decisions | None = None
        self.fruitless = 0
        """Number of trials in a row that needed no training."""

    def train(self, upcoming: Iterator[AdmittedTrial], decisions: Decisions | None = None) -> None:
        """Trains the trials that come up; a trial is made when it can start.

        `decisions` has the sampler and the stopping rule, while the study searches; without it selection is
        frozen, and results of other studies do not count, since weights are wanted.
        """
        self._upcoming, self._decisions = upcoming, decisions
        self._training.clear()
        self._scheduler.run(self)

    def take_in(self, record: TrialRecord) -> None:
        """Takes in a trial that has ended: equal jobs share its result, weights that nobody wants are dropped."""
        self.note(record)
        LOG.info("trial %d: %s%s", record.number, record.result.outcome, _why(record))
        if self._decisions is not None:
            self._decisions.tell(record)
        gone_on = any(attempt.outcome is Outcome.STOPPED for attempt in record.attempts[:-1])
        if record.result.outcome.holds_for_equal_jobs and (
            gone_on or record.job.fingerprint not in self._known
        ):
            self._known[record.job.fingerprint] = record
        # before weights are dropped, for a source notes the file by which others may fetch them
        for source in self._sources:
            source.publish(record)
        if self._decisions is None or gone_on:
            self._renew_shared(record)
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
        """Notes an interruption, whose processes are gone, in the ledger, where that can be relied on."""
        if resumable:
            for training in self._scheduler.running:
                # an attempt may have ended before the interruption: the trial is cut short in its next one
                self.note(cut_short(self._next_attempt(training) or training.record))
            # trials that wait, and what the interruption found between its first commit and its place among the
            # running ones, or between that place and its last commit: only the ledger has all of them
            for record in self._ledger.running():
                self.note(cut_short(record))

    # what follows is `Work`

    def begin(self) -> Iterator[Training | None]:
        """Begins the trials that come up."""
        for record, job in self._upcoming:
            self.fruitless += 1
            yield self._place(record, job)

    def has_room(self) -> bool:
        """Whether more trials may begin; waiting ones count, or a sampler could propose equal ones without end."""
        return len(self._waiting) < self._side_by_side

    def heard(self, activity: Training) -> bool:
        """Takes in a curve that has grown; says whether the stopping rule gives the trial up."""
        record, before = activity.record, self._state.trials[activity.record.number]
        if activity.progress is not None:
            self._state.progress[record.number] = activity.progress
        stopped = self._decisions.stopped(record, before) if self._decisions is not None else None
        if stopped is not None:
            activity.stop(stopped)
            return True
        if self._decisions is not None and not activity.run.ended and self._cuts_short(record):
            activity.run.kill()
            self._cut.add(record.number)
            return True
        if not activity.run.ended and record is not before:
            self._state.note(record)
            if self._decisions is not None:
                self._decisions.note(record)
        return False

    def ended(self, activity: Training) -> Iterator[Training]:
        """Begins the trial's next attempt, or takes it in; then what has waited for it need not wait."""
        record = activity.record
        self._state.progress.pop(record.number, None)
        if record.number in self._cut:
            self._cut_short_with_waiting(record)
            return
        next_record = self._next_attempt(activity)
        if next_record is not None:
            LOG.info(
                "trial %d: %s%s, and is tried again", next_record.number, record.result.outcome, _why(record)
            )
            self.note(next_record)
            yield self._trainer.start(next_record, activity.job)
            return
        self._training.discard(record.job.fingerprint)
        self.take_in(self._admission.ended(record, activity.job))
        yield from self._begin_waiting(record.job.fingerprint)

    def looked(self) -> None:
        """Calls all observers."""
        self._state.tell()

    def _place(self, record: TrialRecord, job: Job | None) -> Training | None:
        """Begins a new job; an equal job's result is shared, and waited for where that job still trains."""
        trained = self._known.get(record.job.fingerprint)
        if job is None:
            self.take_in(record)
        elif trained is not None and trained.owner != record.number:
            self.take_in(_shared(record, trained))
        elif not record.attempts and (result := self._done_elsewhere(record)) is not None:
            self.take_in(result)
            self.fruitless = 0
        else:
            self.note(record)
            if job.fingerprint not in self._training:
                self.fruitless = 0
                self._training.add(job.fingerprint)
                return self._trainer.start(record, job)
            self._waiting.append((record, job))
        return None

    def _cut_short_with_waiting(self, record: TrialRecord) -> None:
        """Notes a trial whose time is over, and those that wait for its result; its checkpoint stays, from which
        it goes on where the study gets more minutes."""
        self._cut.discard(record.number)
        self._training.discard(record.job.fingerprint)
        waiting = [pair for pair in self._waiting if pair[0].job.fingerprint == record.job.fingerprint]
        for trial in (record, *(trial for trial, _ in waiting)):
            LOG.info("trial %d: cut short, for its time is over", trial.number)
            self.note(cut_short(trial))
        self._waiting = [pair for pair in self._waiting if pair not in waiting]

    def _begin_waiting(self, fingerprint: str) -> Iterator[Training]:
        """Places the trials that have waited for this job; where one of them trains it now, the others wait on."""
        for waiting in [pair for pair in self._waiting if pair[0].job.fingerprint == fingerprint]:
            if fingerprint not in self._training:
                # before the trial ends: what waits at an interruption is noted as cut short
                self._waiting.remove(waiting)
                training = self._place(*waiting)
                if training is not None:
                    yield training

    def _next_attempt(self, training: Training) -> TrialRecord | None:
        """The trial as it begins its next attempt; None where the last may not be followed by another."""
        record = training.record
        if not record.result.outcome.may_be_tried_again:
            return None
        return self._admission.next_attempt(record, training.job)

    def _done_elsewhere(self, record: TrialRecord) -> TrialRecord | None:
        """The trial with the result of another study; None where there is none, or once selection is frozen."""
        if self._decisions is None:
            return None
        results = (source.result(record) for source in self._sources)
        return next((result for result in results if result is not None), None)

    def _renew_shared(self, record: TrialRecord) -> None:
        """Gives the new result to trials that share one which was trained again."""
        for trial in list(self._state.trials.values()):
            if trial.origin.reused_from == record.number:
                self.note(_shared(trial, record))


def _shared(record: TrialRecord, trained: TrialRecord) -> TrialRecord:
    """A trial whose job has been trained already, with the result and plan of that training."""
    return record.with_result_of(trained, reused_from=trained.owner).replace(plan=trained.plan)


def _why(record: TrialRecord) -> str:
    return f" ({record.result.error})" if record.result.error else ""
