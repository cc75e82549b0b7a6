"""The driver of a study, from its first trial to its scored winners: baseline, search, tuning, promotion, the end.

One driver, several trials side by side, each in processes of its own. Whatever moment the driver ends at, the same
command goes on from there. `search.study.open_study` puts a driver together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from dashboards.sentences.minutes import search_ended
from dashboards.sentences.stages import passes_found
from search.budget.budget import Budget
from search.planning.admission import Admission
from search.reuse.result_source import ResultSource
from search.study.candidates import CandidateSource
from search.study.decisions import Decisions
from search.study.finalize import Finals
from search.study.full_data import require_promoted
from search.study.passes import Passes
from search.study.settings import StudySettings
from search.study.trial_runner import TrialRunner
from search.study_state import StudyState
from spaces.space import Point
from trials.job import Job
from trials.record import TrialRecord
from trials.storage.ledger import Ledger
from trials.study_record import StageName, StudyRecord

LOG = logging.getLogger(__name__)


class Study:
    """The driver of one study in one run directory."""

    def __init__(
        self,
        *,
        settings: StudySettings,
        state: StudyState,
        ledger: Ledger,
        sources: Sequence[ResultSource],
        candidates: CandidateSource,
        admission: Admission,
        decisions: Decisions,
        runner: TrialRunner,
        finals: Finals,
        promotions: Callable[[], Iterator[tuple[TrialRecord, Job]]] | None,
        passes: Passes,
        budget: Budget,
    ) -> None:
        """A study that is opened.

        Args:
            settings: the study's settings, and its other parts, as `search.study.open_study` puts them together.
            promotions: trainings on all rows, where the search is on a part of them.
            passes: the number of passes that trainings have, or what finds it.
            budget: what the study may still do.
        """
        self._settings, self._state, self._ledger, self._sources = settings, state, ledger, sources
        self._candidates, self._admission, self._decisions = candidates, admission, decisions
        self._runner, self._finals, self._promotions = runner, finals, promotions
        self._passes, self._budget = passes, budget

    def run(self) -> StudyRecord:
        """Trains what is still to be trained, scores the winners on test; the study's record.

        Raises:
            UserError: where no training of the baseline completes, or the database fails.
        """
        self._settings.note(self._state, finished=False)
        try:
            for stage in (
                self._find_passes,
                self._baseline,
                self._search,
                self._tune,
                self._promote,
                self._finalise,
            ):
                LOG.info("stage: %s", stage.__name__.strip("_"))
                stage()
            self._settings.note(self._state, finished=True, stage=None)
        except BaseException as error:
            LOG.warning("broken off: %s", type(error).__name__)
            resumable = isinstance(error, KeyboardInterrupt)
            self._runner.break_off(resumable=resumable)
            if resumable:
                self._settings.note(self._state)
            raise
        finally:
            self._state.head = self._state.head.replace(running=False)
            self._ledger.close()
            for source in self._sources:
                source.close()
        self._state.tell()
        return self.record()

    def record(self) -> StudyRecord:
        """The study as it stands."""
        return self._state.record()

    def _find_passes(self) -> None:
        """Needs nothing; gives the number of passes that trainings have, where the log decides it."""
        if self._passes.found is None:
            self._enter(StageName.PASSES)
            self._passes.find(self._state.trials, self._train_baseline)
            self._settings.note(self._state, passes=self._passes.found)
            sentence = passes_found(self._state.head)
            assert sentence is not None
            LOG.info("%s", sentence)
            self._state.say(sentence)

    def _train_baseline(self, number: int, point: Point) -> None:
        self._runner.train(self._candidates.baseline_trial(number, point), self._decisions)

    def _baseline(self) -> None:
        """Needs the number of passes; gives the tuned baseline that NE is relative to."""
        self._enter(StageName.BASELINE, self._candidates.baseline_total)
        self._runner.train(self._candidates.baseline_trials(), self._decisions)
        self._state.require_baseline()

    def _search(self) -> None:
        """Needs the baseline; gives candidates until the budget is spent."""
        self._enter(StageName.SEARCH, self._state.head.trials_budget)
        upcoming = self._candidates.proposed_trials(lambda: self._runner.fruitless)
        self._runner.train(upcoming, self._decisions)
        if self._budget.enough is not None and self._settings.head.expected_gain is None:
            self._settings.note(self._state, expected_gain=self._budget.enough)
            sentence = search_ended(self._state.head)
            assert sentence is not None
            LOG.info("%s", sentence)
            self._state.say(sentence)

    def _tune(self) -> None:
        """Needs the search's candidates; gives the best architectures with other training settings, where that has
        not taken turns with the search."""
        if self._candidates.tunes_afterwards:
            self._enter(StageName.TUNING, self._state.head.trials_budget)
        self._runner.train(self._candidates.tuning_trials(), self._decisions)

    def _promote(self) -> None:
        """Needs the front of a search on a part of the log; gives its members and the baseline trained on all
        rows.

        From here on selection is frozen: neither the sampler nor the stopping rule sees anything any more.
        """
        if self._promotions is not None:
            self._enter(StageName.ALL_ROWS)
            known = self._state.trials  # what was cut short goes on with its next attempt
            self._runner.train(
                self._admission.admit(record, job, known.get(record.number))
                for record, job in self._promotions()
            )
            require_promoted(self._state)

    def _finalise(self) -> None:
        """Needs the selection; gives winners with weights, averages, what learns from them, the choice, scores on
        test, intervals."""
        self._enter(StageName.AVERAGES)
        self._finals.recover_weights()
        self._finals.make_averages()
        self._enter(StageName.DISTILLING)
        self._finals.distil()
        self._enter(StageName.CHOICE)
        # the ledger has what is chosen before test is looked at
        self._settings.note(self._state, choice=self._finals.choose_winners())
        self._enter(StageName.TEST)
        self._finals.score_winners()
        self._enter(StageName.CONFIRMATION)
        self._finals.confirm_winners()

    def _enter(self, stage: StageName, total: int | None = None) -> None:
        self._settings.enter(self._state, stage, total)
