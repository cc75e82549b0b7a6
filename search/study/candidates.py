"""The trials that a study trains, as they come up: the baseline's own, the sampler's proposals, those of the
tuning stage."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.values import parse
from search.execution.admission import AdmittedTrial
from search.execution.budget import TUNED_ARCHITECTURES, untuned
from search.execution.growth import Growth
from search.execution.passes import EPOCHS, OF_TABLES, has_decay
from search.execution.proposals import OutsideProposals
from search.execution.trainer import candidate_of, new_record, now
from search.study.parts import StudyParts
from search.study.reuse import next_point
from search.study.tuning import Architecture, best_architectures
from spaces.nearest import nearest_label, nearest_point
from spaces.space import Candidate, Point
from trials.records.job import TrainingConfig
from trials.records.trial_record import Origin, Outcome, TrialKind, TrialRecord

LOG = logging.getLogger(__name__)
MOST_TOO_LONG = 3
"""Number of proposals in a row that would outlast the search after which the sampler is asked no more: it may
plan hundreds of points for each. An assumption."""


class CandidateSource:
    """Makes trials one by one, each as late as there is a place for it, so that it knows of all trials that have
    ended."""

    def __init__(
        self,
        parts: StudyParts,
        *,
        starts: Sequence[Point],
        growth: Growth,
        outside: OutsideProposals | None = None,
    ) -> None:
        """The trials of one study.

        Args:
            parts: the study's parts.
            starts: start points of earlier studies of other logs.
            growth: widens the space.
            outside: proposals from outside; None if there are none.
        """
        self._config, self._space, self._jobs = parts.config, parts.space, parts.jobs
        self._state, self._budget, self._proposals = parts.state, parts.budget, parts.proposals
        self._admission, self._warm_start = parts.admission, parts.warm_start
        self._starts, self._growth, self._outside = starts, growth, outside
        self._too_long = 0
        """Number of the sampler's proposals in a row that would have outlasted the search."""

    def baseline_trials(self) -> Iterator[AdmittedTrial]:
        """The baseline as given and tuned, as far as its trials have not ended.

        Where its first trials have found the number of passes, they were the baseline as given.
        """
        finding = self._finding_passes
        for index in range(min(finding, 1), self._config.baseline_trials):
            number = index + max(0, finding - 1)
            # once candidates have begun they have the numbers of trainings that there was no time for
            if number not in self._state.trials and (
                self._state.candidates or not self._budget.has_time_for_baseline()
            ):
                LOG.info("the baseline is tuned in %d of %d trainings", index, self._config.baseline_trials)
                return
            point = self._jobs.baseline.point(index, self._config.seed)
            if not has_decay(self._jobs.baseline.training):  # embeddings decay as where several passes helped
                decays: Point = {f"training.{key}": value for key, value in self._decays().items()}
                point = decays | point
            yield from map(self._in_time, self.baseline_trial(number, point))

    @property
    def baseline_total(self) -> int:
        """Number of the baseline's trainings, as long as there is time for all."""
        return self._config.baseline_trials + max(0, self._finding_passes - 1)

    @property
    def _finding_passes(self) -> int:
        """Number of the baseline's first trials that have found the number of passes."""
        # a candidate has a number of passes among its values if the space has an axis for it
        return sum(
            trial.kind is TrialKind.BASELINE and EPOCHS in trial.point
            for trial in self._state.trials.values()
        )

    def baseline_trial(self, number: int, point: Point) -> Iterator[AdmittedTrial]:
        """The baseline at a point as the trial of this number, unless that has ended."""
        earlier = self._state.trials.get(number)
        cut_short = earlier is not None and earlier.result.outcome is Outcome.INTERRUPTED
        if earlier is None or (earlier.kind is TrialKind.BASELINE and cut_short):
            job = self._jobs.of_baseline(point)
            yield self._admission.admit(new_record(number, TrialKind.BASELINE, point, job), job, earlier)

    def _decays(self) -> dict[str, float]:
        passes = self._state.head.passes
        return passes.decays if passes is not None else {}

    @property
    def _undecayed(self) -> Point:
        """The value that proposals are held to if a technique excludes decay of whole tables; else nothing."""
        axis = self._space.training_axes.get(OF_TABLES)
        if axis is None or axis.size == 1 or self._state.head.undecayed_under is None:
            return {}
        return {axis.name: nearest_label(axis, 0.0)}

    def proposed_trials(self, fruitless: Callable[[], int]) -> Iterator[AdmittedTrial]:
        """Candidates that were cut short, then new proposals until the budget is spent: one from outside, one of
        the sampler, and so on.

        `fruitless` says how many trials in a row needed no training, as of now.
        """
        baseline = self._state.require_baseline()
        yield from self._cut_short()
        while True:
            if self._budget.search_is_over(fruitless()):
                return
            if self._too_long >= MOST_TOO_LONG:
                if self._budget.has_candidates:
                    return
                yield self._fastest()
                continue
            if self._budget.tuning_is_next() and (best := self._best_architectures()):
                yield self._tuning(best)
            else:
                yield self._from_outside() or self._sampled(baseline)

    @property
    def waits_for_a_driver(self) -> bool:
        """Whether a candidate was cut short that there is time for."""
        return bool(self._interrupted()) and self._budget.has_time_for_candidate()

    def _interrupted(self) -> list[TrialRecord]:
        """Candidates that were cut short, in order."""
        trials = map(self._state.trials.__getitem__, sorted(self._state.unfinished))
        return [
            trial
            for trial in trials
            if trial.kind is TrialKind.CANDIDATE
            and trial.origin.promoted_from is None
            and trial.result.outcome is Outcome.INTERRUPTED
        ]

    def _cut_short(self) -> Iterator[AdmittedTrial]:
        """Candidates that were cut short, as far as there is time, and winners that were while they were trained
        for their weights; what another driver runs is left to it."""
        for record in self._interrupted():
            if record.origin.trained_for_weights or self._budget.has_time_for_candidate():
                origin = record.origin
                yield self._admitted(
                    record.point,
                    record,
                    sampler_notes=origin.sampler_notes,
                    tuned_from=origin.tuned_from,
                    proposal=origin.proposal,
                    trained_for_weights=origin.trained_for_weights,
                )

    def _sampled(self, baseline: TrialRecord) -> AdmittedTrial:
        """The sampler's next proposal."""
        self._growth.look()
        start = self._start_point(baseline, self._state.candidates)
        left, axes = self._space.left_for_tuning, self._space.training_axes
        # what waits for the tuning stage has its first value, but for decays without which passes do not help
        decays = {
            axis.name: nearest_label(axis, value)
            for key, value in self._decays().items()
            if (axis := axes.get(key)) is not None and axis.name in left
        }
        start = start and start | self._undecayed
        point, notes = self._ask(start, left | decays | self._undecayed)
        admitted = self._in_time(self._admitted(point, sampler_notes=notes))
        if not start:  # a start point has taken no time to find
            self._too_long = self._too_long + 1 if admitted[0].result.not_begun else 0
        return admitted

    def _in_time(self, admitted: AdmittedTrial) -> AdmittedTrial:
        """Returns a trial as it was admitted, or as infeasible if it would outlast its part of the minutes."""
        record, job = admitted
        why = self._budget.too_long(record) if job is not None and not record.attempts else None
        if why is None:
            return admitted
        LOG.info("trial %d: %s", record.number, why)
        return record.with_result(outcome=Outcome.INFEASIBLE, error=why, seconds=0.0), None

    def _fastest(self) -> AdmittedTrial:
        """Returns the fastest of the candidates that were not begun. None can end in time, so it trains until it
        is stopped."""
        refused = [one for one in self._state.candidates if one.result.not_begun and not one.outside_space]
        fastest = min(refused, key=lambda trial: self._admission.execution.step_seconds(trial) or math.inf)
        self._too_long = 0
        _, notes = self._ask(fastest.point)
        return self._admitted(fastest.point, sampler_notes=notes)

    def _from_outside(self) -> AdmittedTrial | None:
        """The next proposal from outside, in turn with the sampler's own; None if it is the sampler's turn, or
        nothing can be taken."""
        candidates = self._state.candidates
        if self._outside is None or (candidates and candidates[-1].origin.proposal is not None):
            return None
        read = self._outside.next()
        if read is None:
            return None
        notes: dict[str, int] = {}
        if not read.proposal.outside:  # the sampler is told of every point, or it would propose it again
            _, notes = self._ask(read.point)
        return self._in_time(
            self._admitted(read.point, candidate=read.candidate, sampler_notes=notes, proposal=read.proposal)
        )

    def _ask(self, start: Point, fixed: Point | None = None) -> tuple[Point, dict[str, int]]:
        """The sampler's point of the next trial, and its notes."""
        return self._proposals.ask(len(self._state.trials), start, fixed)

    def tuning_trials(self) -> Iterator[AdmittedTrial]:
        """The best architectures with other training settings, once every candidate of the search has ended."""
        yield from self._cut_short()
        best = self._best_architectures()
        while best and not self._budget.tuning_is_over():
            yield self._tuning(best)

    def _best_architectures(self) -> tuple[Architecture, ...]:
        return best_architectures(self._state.candidates, self._space, TUNED_ARCHITECTURES)

    def _tuning(self, best: Sequence[Architecture]) -> AdmittedTrial:
        """The sampler's next proposal for the architecture that was tuned least often, the first of several."""
        often = Counter(trial.origin.tuned_from for trial in self._state.candidates)
        architecture = min(best, key=lambda architecture: often[architecture.trial])
        point, notes = self._ask({}, architecture.fixed | self._undecayed)
        return self._in_time(self._admitted(point, sampler_notes=notes, tuned_from=architecture.trial))

    def _start_point(self, baseline: TrialRecord, candidates: Sequence[TrialRecord]) -> Point:
        """What the next candidate should try: first the baseline's own network and training, so that the study is
        not behind it, then the space's start points, then what is first beyond the ends of axes that were widened,
        then the start points of earlier studies; empty past the last."""
        index = sum(trial.origin.proposal is None for trial in untuned(candidates))
        # the ledger leaves out settings that have their default
        training = dict(parse(TrainingConfig, baseline.job.training, "ledger"))
        if index == 0:
            return nearest_point(self._space, parse_model(baseline.job.model, "ledger"), training)
        start = self._space.start_point(index - 1, training)
        start = start or self._growth.start_point(candidates)
        return start or next_point((*self._warm_start.starts, *self._starts), candidates)

    def _admitted(
        self,
        point: Point,
        earlier: TrialRecord | None = None,
        *,
        candidate: Candidate | None = None,
        **origin: Any,
    ) -> AdmittedTrial:
        """A candidate, new or cut short, with its plan; a point that gives no model has ended as infeasible."""
        began = time.monotonic()
        number = len(self._state.trials) if earlier is None else earlier.number
        try:
            if candidate is None:
                candidate = candidate_of(earlier, self._space) if earlier else self._space.decode(point)
            job = self._jobs.of_candidate(candidate)
        except UserError as error:
            record = TrialRecord(
                number=number,
                kind=TrialKind.CANDIDATE,
                point=point,
                origin=Origin(started_at=now(), **origin),
            )
            seconds = time.monotonic() - began
            return record.with_result(outcome=Outcome.INFEASIBLE, error=str(error), seconds=seconds), None
        record = new_record(number, TrialKind.CANDIDATE, point, job, **origin)
        return self._admission.admit(record, job, self._state.trials.get(number))
