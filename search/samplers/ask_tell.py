"""Optuna's side of a study: ask for points, tell results; made anew from the ledger when a study is resumed.

The Optuna study lives in memory: the ledger knows each point and how it ended, so nothing is kept twice
and nothing can disagree (docs/decisions/0007-candidates-side-by-side.md). The sampler is made anew for
each proposal from the study's seed and the proposal's number, so a study that was interrupted proposes
what it would have proposed without.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dhen.values import fingerprint
from search.samplers import check_sampler, make_sampler, successor
from search.samplers.context import CandidatePricer, SamplerContext
from search.selection import log_flops
from spaces.space import Point
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial, TrialState

MEMORY = "memory"
"""Name of the constraint that a candidate fits: `TrialPlan.memory_excess`, a ratio, feasible at 0 or less."""
SERVING = "serving"
"""Name of the constraint `TrialPlan.serving_excess`, if serving or table bytes have limits: samplers add up
both excesses."""
NE_OF_INFEASIBLE = 1.0
"""NE of a candidate that never trained: that of the base rate alone, 1 by definition of NE. Samplers go by the
constraint there."""


class Proposals:
    """Points of a space, proposed by a sampler that learns from the results of earlier points."""

    def __init__(
        self,
        *,
        pricer: CandidatePricer,
        sampler: str,
        seed: int,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """An Optuna study of two objectives, NE and log FLOPs, over the space of `pricer`.

        Raises:
            UserError: when the sampler is unknown.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._space, self._sampler, self._seed = pricer.space, sampler, seed
        self._axes, self._say, self._said = self._distributions(), say, False
        self._context = SamplerContext(pricer)
        check_sampler(sampler)
        self._study = self._new_study()
        self._optuna_numbers: dict[int, int] = {}
        self._asked: dict[int, Trial] = {}
        self._replaced: dict[int, TrialRecord] = {}

    def remember(self, candidates: Iterable[TrialRecord]) -> None:
        """Takes over the candidates of earlier sessions, in order; those that have not ended count as running."""
        for record in filter(is_proposal, candidates):
            self._optuna_numbers[record.number] = len(self._optuna_numbers)
            self._study.add_trial(self._remembered(record))
            self._share_axes(record.number)
            self._context.points[record.number] = record.point
            self.note(record)

    def ask(self, number: int, start: Point, fixed: Point | None = None) -> tuple[Point, dict[str, int]]:
        """The point of the trial with this number, and the sampler's notes.

        Args:
            number: number of the trial.
            start: values that the point has, whatever the sampler would choose.
            fixed: further values that the point has; the sampler chooses the rest for these values, not for the
                best point that it can think of anywhere.
        """
        if self._replaced:
            self._replace()
        index = len(self._study.get_trials(deepcopy=False))
        fixed = self._context.fixed = fixed or {}
        if fixed or start:
            self._study.enqueue_trial(self._space.for_optuna(fixed | start))
        seed = int(fingerprint([self._seed, index]), 16) % 2**32
        axes = {name: axis for name, axis in self._axes.items() if name not in fixed}
        self._study.sampler = make_sampler(self._sampler, seed, axes, self._context)
        follower = successor(self._sampler, len(self._context.points))
        if follower is not None and not self._said:
            self._said = True
            self._say(
                f"sampler={self._sampler} ends after {len(self._context.points)} candidates; {follower} goes on"
            )
        trial = self._study.ask()
        self._optuna_numbers[number] = trial.number
        self._asked[number] = trial
        point = self._context.points[number] = self._space.sample(trial)
        attributes = self._study.get_trials(deepcopy=False)[trial.number].system_attrs
        return point, {key: value for key, value in attributes.items() if isinstance(value, int)}

    def take_wider_space(self) -> None:
        """Proposes from the space as it is from now on, after it was widened (`Space.widen`)."""
        self._axes = self._distributions()

    def note(self, record: TrialRecord) -> None:
        """Takes in what a proposal that still trains has shown so far; all else that trains is passed over."""
        if is_proposal(record):
            self._context.records[record.number] = record

    def tell(self, record: TrialRecord) -> None:
        """Takes in how a proposal stands: that it has ended, or goes on; all else is passed over."""
        if not is_proposal(record):
            return
        self.note(record)
        state, values = self._result(record)
        optuna_trial = self._asked.get(record.number) or self._running(record.number)
        if optuna_trial is None:
            # another driver commits an end twice, as its training says so and as its processes have gone
            known_trial, now_trial = self._known(record.number), self._remembered(record)
            if record.number in self._replaced or any(
                getattr(known_trial, name) != getattr(now_trial, name)
                for name in ("state", "values", "constraints")
            ):
                self._replaced[record.number] = record
        elif state.is_finished():
            self._asked.pop(record.number, None)
            known, now = self._known(record.number).constraints or {}, _constraints(record)
            if any(known.get(name, excess) != excess for name, excess in now.items()):
                # it was taken in while it ran, and does not fit as was planned; Optuna keeps what it knew first
                self._replaced[record.number] = record
                return
            for name, excess in now.items():
                if name not in known:
                    optuna_trial.set_constraint(name, excess)
            self._study.tell(self._optuna_numbers[record.number], values, state)
            self._share_axes(record.number)

    def _running(self, number: int) -> Trial | None:
        """A proposal of an earlier session or of another driver that has not ended as far as Optuna knows; None
        if it has."""
        frozen = self._known(number)
        if frozen.state.is_finished() or number in self._replaced:
            return None
        return self._optuna.trial.Trial(self._study, frozen._trial_id)

    def _share_axes(self, number: int) -> None:
        """Has a trial of Optuna's share the axes with all others; it keeps a copy of each, most of its memory."""
        known = self._known(number)
        if known.distributions == self._axes:  # else the space was widened since, or some values were fixed
            known.distributions = self._axes

    def _known(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[self._optuna_numbers[number]]

    def _replace(self) -> None:
        """Puts proposals as they stand in the place of what Optuna has of them, if they have ended otherwise:
        Optuna takes no second end of a trial, so its study is made anew, once for all of them. That takes the
        longer the more trials there are."""
        trials = self._study.get_trials(deepcopy=False)
        for number, record in self._replaced.items():
            trials[self._optuna_numbers[number]] = self._remembered(record)
        self._replaced.clear()
        self._study = self._new_study()
        self._study.add_trials(trials)
        for number in self._optuna_numbers:
            self._share_axes(number)
        # what was asked of the study before ends in this one
        self._asked.clear()

    def _new_study(self) -> Study:
        return self._optuna.create_study(directions=["minimize", "minimize"])

    def _distributions(self) -> dict[str, BaseDistribution]:
        """Distributions of all axes, by name, from which any point of the space is drawn."""
        point = self._space.random_point(random.Random(0))
        trial = self._optuna.trial.FixedTrial(self._space.for_optuna(point))
        self._space.sample(trial)
        return dict(sorted(trial.distributions.items()))

    def _remembered(self, record: TrialRecord) -> FrozenTrial:
        """A candidate of the ledger as a trial of Optuna."""
        state, values = self._result(record)
        return self._optuna.trial.create_trial(
            state=state,
            values=values,
            params=self._space.for_optuna(record.point),
            distributions=self._axes,
            system_attrs=dict(record.origin.sampler_notes),
            constraints=_constraints(record) or None,
        )

    def _result(self, record: TrialRecord) -> tuple[TrialState, list[float] | None]:
        """State and values of a trial for Optuna; trials that cannot be trained do not count as failed.

        Else samplers would go on proposing their corner. A trial that does not fit in memory, or is over a limit
        of serving or of table bytes, is complete and violates the constraint, which both TPE and NSGA-II rank
        below all that fit, by how much they lack; TPE alone learns from pruned ones.
        """
        state = self._optuna.trial.TrialState
        if record.result.outcome.unfinished:
            return state.RUNNING, None
        if record.result.outcome is Outcome.COMPLETED:
            assert record.result.validation is not None
            if not math.isnan(record.result.validation.ne):
                return state.COMPLETE, [record.result.validation.ne, log_flops(record.job.flops)]
            return state.FAIL, None
        not_trainable = (Outcome.INFEASIBLE, Outcome.OUT_OF_MEMORY)
        if record.result.outcome in not_trainable and max(_constraints(record).values(), default=0.0) > 0:
            return state.COMPLETE, [NE_OF_INFEASIBLE, log_flops(record.job.flops)]
        return (state.FAIL if record.result.outcome is Outcome.FAILED else state.PRUNED), None


def is_proposal(record: TrialRecord) -> bool:
    """Whether a trial is a candidate of the search, at a point of the space."""
    promoted = record.origin.promoted_from is not None
    return record.kind is TrialKind.CANDIDATE and not promoted and not record.outside_space


def _constraints(record: TrialRecord) -> dict[str, float]:
    """Excesses of a trial by name of the constraint, if they are known; feasible at 0 or less."""
    excesses = {MEMORY: record.plan.memory_excess, SERVING: record.plan.serving_excess}
    return {name: excess for name, excess in excesses.items() if excess is not None}
