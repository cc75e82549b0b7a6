"""What decides while a study searches: the sampler, which learns from candidates, and the stopping rule."""

from __future__ import annotations

from search.samplers.ask_tell import Proposals
from search.stopping.base import Judge, first_stop
from search.study_state import StudyState
from trials.record import Outcome, TrialKind, TrialRecord


class Decisions:
    """The sampler and the stopping rule, if there is one, of a study; both see candidates alone."""

    def __init__(self, proposals: Proposals, rule: Judge | None, state: StudyState) -> None:
        self._proposals, self._rule, self._state = proposals, rule, state
        self._judged = {
            number: len(trial.result.curve)
            for number, trial in state.trials.items()
            if trial.result.outcome is Outcome.INTERRUPTED
        }
        """Number of evaluations of each trial that were judged, also before a Ctrl-C: a training that goes on
        tells them once more, and more is known by then. Of one whose driver was killed that is not known."""

    def stopped(self, record: TrialRecord, before: TrialRecord) -> TrialRecord | None:
        """How a training trial ends where the stopping rule gives it up at an evaluation that is new; else None.

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

    def note(self, record: TrialRecord) -> None:
        """The sampler may look at what a candidate that still trains has shown so far."""
        if record.kind is TrialKind.CANDIDATE and not record.outside_space:
            self._proposals.note(record)

    def tell(self, record: TrialRecord) -> None:
        """The sampler learns how a candidate ended."""
        if record.kind is TrialKind.CANDIDATE and not record.outside_space:
            self._proposals.tell(record)
