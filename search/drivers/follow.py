"""Brings what one driver holds up to date with what the study's other drivers have committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dhen.values import compact
from search.growth.replay import widen_again
from search.ordered_axes import ordered_axes
from search.planning.admission import Admission
from search.read_study import HEAD
from search.reuse.kept_weights import KeptWeights
from search.samplers.ask_tell import Proposals
from search.study_state import StudyState
from spaces.space import Space
from trials.record import TrialKind, TrialRecord
from trials.storage.ledger import Changes
from trials.study_record import StudyRecord

SHARED = (
    "passes",
    "refused",
    "grown",
    "choice",
    "refits",
    "expected_gain",
    "finished",
    "finished_at",
    "stage",
)
"""Facts of a study's head that any of its drivers may change."""


class Follower:
    """Takes in commits of other drivers, where this driver's parts have to know of them."""

    def __init__(
        self,
        *,
        state: StudyState,
        space: Space,
        proposals: Proposals,
        admission: Admission,
        weights: KeptWeights,
        ended: Callable[[TrialRecord], None],
        head: Callable[[dict[str, Any]], None],
    ) -> None:
        """What follows the other drivers of one study.

        Args:
            state: state of the study, and other parts of this driver.
            ended: is called with each trial that another driver has ended.
            head: is called with what has changed in the study's head.
        """
        self._state, self._space, self._proposals = state, space, proposals
        self._admission, self._weights = admission, weights
        self._ended, self._head = ended, head

    def __call__(self, changes: Changes) -> None:
        """Takes in changes."""
        noted = changes.facts.get(HEAD)
        if noted is not None:
            self._take_head(StudyRecord.model_validate(noted))
        for trial in changes.trials:
            self._take(trial)

    def _take_head(self, head: StudyRecord) -> None:
        steps = head.grown[len(self._state.head.grown) :]
        if steps:  # before trials that lie beyond the ends so far
            widen_again(self._space, steps)
            self._proposals.take_wider_space()
        changed = {name: getattr(head, name) for name in SHARED} | {"axes": ordered_axes(self._space)}
        if changed != {name: getattr(self._state.head, name) for name in changed}:
            self._head(changed)

    def _take(self, trial: TrialRecord) -> None:
        trial = compact(trial)
        before = self._state.trials.get(trial.number)
        self._state.note(trial)
        searched = trial.kind is TrialKind.CANDIDATE and trial.origin.promoted_from is None
        if searched and not trial.outside_space:
            if before is None:
                self._proposals.remember([trial])
            else:
                self._proposals.tell(trial)
        if not trial.result.outcome.unfinished and (before is None or before.result.outcome.unfinished):
            self._admission.learn(trial)
            self._weights.note(trial)
            self._ended(trial)
            self._state.ended.append(trial.number)
