"""The driver of a study, from its first trial to its scored winners: baseline, search, tuning, promotion, the end.

One driver, several trials side by side, each in processes of its own. Whatever moment the driver ends at, the same
command goes on from there. `search.study.open_study` puts a driver together.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from dashboards.sentences.stages import passes_found, search_ended
from dhen.values import compact
from search.execution.admission import AdmittedTrial
from search.execution.growth import ordered_axes, widen_again
from search.execution.trainer import now
from search.read_study import HEAD
from search.samplers.stopping import Judge
from search.study.candidates import CandidateSource
from search.study.drivers import POLL_SECONDS
from search.study.finalize import Finalizer
from search.study.parts import StudyParts
from search.study.trial_runner import SearchPolicy, TrialRunner
from search.study.tuning import promotions, require_promoted
from spaces.space import Point
from trials.records.study_record import StageName, StudyRecord
from trials.records.trial_record import TrialKind
from trials.store.ledger import Changes

LOG = logging.getLogger(__name__)
STAGES = tuple(StageName)
"""All stages, in their order."""
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


class StudyDriver:
    """The driver of one study in one run directory."""

    def __init__(
        self,
        parts: StudyParts,
        candidates: CandidateSource,
        runner: TrialRunner,
        finals: Finalizer,
        rule: Judge | None,
    ) -> None:
        """A study that is opened; `rule` is its stopping rule."""
        self.sharing = runner.sharing
        """This driver's share in the study; None if it is the only one."""
        self._parts, self._settings, self._state = parts, parts.settings, parts.state
        self._candidates, self._runner, self._finals = candidates, runner, finals
        self._passes, self._budget = parts.jobs.passes, parts.budget
        self._decisions = SearchPolicy(parts.proposals, rule, parts.state)

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record.

        Of a study's drivers one does what follows the search, and the others wait for it: should it die, another
        does.

        Raises:
            UserError: if no training of the baseline completes, or the database fails.
        """
        joins = self.sharing is not None and self.sharing.joins
        self._settings.note(**({} if joins else {"finished": False}))
        try:
            if self.sharing is None:
                self._go_through(self._finals.go_on_for_weights)
            self._go_through(self._find_passes)
            while True:
                self._go_through(self._baseline, self._search, self._tune)
                if not self._wait_to_lead(lambda: self._candidates.waits_for_a_driver):
                    self._finals.read_again()
                    break  # another driver has done the rest
                if self.does_the_end:
                    broken_off = self._budget.promotes
                    self._go_through(self._promote)
                    if broken_off:  # it may have more budget than it had when its promotions began
                        self._leave_lead()
                        continue
                    self._go_through(self._finalise)
                    ended = self._settings.head.finished_at or now()
                    self._settings.note(finished=True, finished_at=ended, stage=None)
                    break
        except BaseException as error:
            LOG.warning("broken off: %s", type(error).__name__)
            resumable = isinstance(error, KeyboardInterrupt)
            self._runner.break_off(resumable=resumable)
            if resumable:
                self._settings.note()
            raise
        finally:
            self._state.head = self._state.head.replace(running=False)
            if self.sharing is None:
                self._parts.ledger.close()
        self._state.tell()
        return self.record()

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._state.record()

    @property
    def does_the_end(self) -> bool:
        """Whether this driver does what one driver does alone: what follows the search, and writing of it."""
        return self.sharing is None or self.sharing.leads

    def note_written(self) -> None:
        """Lets the other drivers know that the end is written too, so that none of them has to do it."""
        if self.sharing is not None and self.sharing.leads and self._state.finished:
            self._settings.note_written()

    def follow(self, changes: Changes) -> None:
        """Takes in what other drivers have committed, if this driver's parts have to know of it."""
        parts, state = self._parts, self._state
        if HEAD in changes.facts:
            head = StudyRecord.model_validate(changes.facts[HEAD])
            steps = head.grown[len(state.head.grown) :]
            if steps:  # before trials that lie beyond the ends so far
                widen_again(parts.space, steps)
                parts.proposals.take_wider_space()
            changed = {name: getattr(head, name) for name in SHARED} | {"axes": ordered_axes(parts.space)}
            if changed != {name: getattr(state.head, name) for name in changed}:
                self._settings.head = self._settings.head.replace(**changed)
                state.head = state.head.replace(**changed)
                state.changes += 1
                # if the settings say how many passes, the head has none
                self._passes.found = self._settings.head.passes or self._passes.found
                self._budget.enough = self._settings.head.expected_gain
        for trial in map(compact, changes.trials):
            before = state.trials.get(trial.number)
            state.note(trial)
            if before is None:
                parts.proposals.remember([trial])
            else:
                parts.proposals.tell(trial)
            if not trial.result.outcome.unfinished and (before is None or before.result.outcome.unfinished):
                parts.admission.learn(trial)
                parts.weights.note(trial)
                self._runner.know(trial)
                state.ended.append(trial.number)

    def _go_through(self, *stages: Callable[[], None]) -> None:
        for stage in stages:
            LOG.info("stage: %s", stage.__name__.strip("_"))
            stage()

    def _wait_to_lead(
        self, more_to_train: Callable[[], bool], done: Callable[[], bool] | None = None
    ) -> bool:
        """Waits until all others' trials have ended and this driver leads, if it has to; False if another
        driver has led, and is done.

        Returns True without the lead if `more_to_train` finds trials that a dead driver left.
        """
        done = done or (lambda: self._state.finished and self._settings.written)
        sharing = self.sharing
        if sharing is None:
            return True
        while True:
            if not sharing.led_elsewhere:
                with sharing.turn() as mine:
                    if mine:
                        if done():
                            return False
                        if more_to_train():
                            return True
                        if not (sharing.led_elsewhere or sharing.run_elsewhere):
                            sharing.take_lead()
                            self._finals.read_again()
                            return True
            self._state.tell()
            time.sleep(POLL_SECONDS)
            sharing.sync()

    def _find_passes(self) -> None:
        """Needs nothing; gives the number of passes that trainings have, if the log decides it."""
        found = self._passes.found is not None
        if not found and self._wait_to_lead(lambda: False, lambda: self._passes.found is not None):
            self._enter(StageName.PASSES)

            def train(points: Mapping[int, Point]) -> None:
                trials = (self._candidates.baseline_trial(number, point) for number, point in points.items())
                self._runner.train(itertools.chain.from_iterable(trials), self._decisions)

            self._passes.find(self._state.trials, train)
            self._settings.note(passes=self._passes.found)
            self._say(passes_found(self._state.head))
            self._leave_lead()

    def _say(self, sentence: str | None) -> None:
        assert sentence is not None
        LOG.info("%s", sentence)
        self._state.say(sentence)

    def _leave_lead(self) -> None:
        if self.sharing is not None:
            self.sharing.leave_lead()

    def _baseline(self) -> None:
        """Needs the number of passes; gives the tuned baseline that NE is relative to."""
        self._enter(StageName.BASELINE, self._candidates.baseline_total)
        self._runner.train_in_turns(
            self._candidates.baseline_trials, self._decisions, lambda trial: trial.kind is TrialKind.BASELINE
        )
        self._state.require_baseline()

    def _search(self) -> None:
        """Needs the baseline; gives candidates until the budget is spent."""
        self._enter(StageName.SEARCH, self._state.head.trials_budget)
        self._runner.train_in_turns(
            self._proposed_trials, self._decisions, lambda trial: trial.origin.tuned_from is None
        )

    def _proposed_trials(self) -> Iterator[AdmittedTrial]:
        """Candidates; if no more are expected to be worth their time, that is noted before another driver's
        turn."""
        yield from self._candidates.proposed_trials(lambda: self._runner.fruitless)
        if self._budget.enough is not None and self._settings.head.expected_gain is None:
            self._settings.note(expected_gain=self._budget.enough)
            self._say(search_ended(self._state.head))

    def _tune(self) -> None:
        """Needs the search's candidates; gives the best architectures with other training settings, if that has
        not taken turns with the search."""
        if self._parts.config.tune_trials:  # a number of candidates, once the search is over
            self._enter(StageName.TUNING, self._state.head.trials_budget)
        self._runner.train_in_turns(self._candidates.tuning_trials, self._decisions)

    def _promote(self) -> None:
        """Needs the front of a search on a part of the log; gives its members and the baseline trained on all
        rows.

        From here on selection is frozen: neither the sampler nor the stopping rule sees anything any more.
        """
        if self._parts.config.training.train_fraction < 1.0:
            self._enter(StageName.ALL_ROWS)
            known = self._state.trials  # what was cut short goes on with its next attempt
            self._runner.train(
                self._parts.admission.admit(record, job, known.get(record.number))
                for record, job in promotions(self._state, self._parts.jobs)
            )
            require_promoted(self._state)

    def _finalise(self) -> None:
        """Needs the selection; gives winners with weights, averages, what learns from them, the choice, scores on
        test, winners that have had validation too, intervals."""
        self._enter(StageName.AVERAGES)
        self._finals.recover_weights()
        self._finals.make_averages()
        self._enter(StageName.DISTILLING)
        self._finals.distil()
        self._enter(StageName.CHOICE)
        # the ledger has what is chosen before test is looked at
        self._settings.note(choice=self._finals.choose_winners())
        self._enter(StageName.TEST)
        self._finals.score_winners()
        if self._finals.refits:
            self._enter(StageName.REFIT)
        self._settings.note(refits=self._finals.refit_winners())
        self._enter(StageName.CONFIRMATION)
        self._finals.confirm_winners()

    def _enter(self, stage: StageName, total: int | None = None) -> None:
        now = self._state.head.stage
        if self.sharing is not None and now is not None and STAGES.index(stage) <= STAGES.index(now.name):
            return  # another driver was there first
        self._settings.enter(stage, total)
