"""The state of a study, shared by its driver, its stages and its observers, and what follows from its trials
together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dhen.errors import UserError
from search.selection import RunningSelection, Selection, eligible, judged
from trials.records.events import Progress
from trials.records.study_record import Comparison, StudyRecord, covered_seconds
from trials.records.trial_record import MADE_OF_WINNERS, Outcome, TrialKind, TrialRecord

Observer = Callable[["StudyState"], None]
"""A function that is called with the study's state at every change, and about ten times per second between."""


class StudyState:
    """Trials and retrainings of a study by number, which of them are selected, and what its observers are told."""

    def __init__(
        self,
        head: StudyRecord,
        trials: Iterable[TrialRecord],
        retrainings: Iterable[TrialRecord] = (),
        *,
        averages: bool = False,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        """A study that is opened.

        Args:
            head: the study's record without trials.
            trials: trials of earlier sessions.
            retrainings: retrainings of earlier sessions.
            averages: whether averages are to be made, so that runners-up count.
            observers: functions that `tell` calls.
            clock: tells the seconds that the study's commands have taken; None for readers of a study, who have
                what its driver has noted.
        """
        self.head, self._averages, self._observers = head, averages, observers
        self._clock = clock
        self.trials: dict[int, TrialRecord] = {}
        """In the order of their numbers, whatever order they come in."""
        self.retrainings: dict[int, TrialRecord] = {trial.number: trial for trial in retrainings}
        self.progress: dict[int, Progress] = {}
        """The last progress that each running training has reported, by number of the trial."""
        self.retraining_progress: dict[int, Progress] = {}
        """The same of running retrainings, which are numbered apart."""
        self.notices: list[str] = []
        """Sentences on anything but the end of trials, since this driver began."""
        self.ended: list[int] = []
        """Numbers of the trials that this driver has seen end, in that order."""
        self.report_seconds = 0.0
        """Seconds that it took to write the report and MLflow's runs, the last time that they were written."""
        self.changes = 0
        """A counter that grows with every change."""
        self._candidates: dict[int, TrialRecord] = {}
        self._promoted: dict[int, TrialRecord] = {}
        self._completed: dict[int, TrialRecord] = {}
        self.unfinished: set[int] = set()
        """Numbers of the trials that run, or were cut short."""
        self._made: set[int] = set()
        """Numbers of the trials that are made of winners."""
        self._selection: Selection | None = None
        self._standing = RunningSelection(averages=averages)
        for trial in trials:
            self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """Takes in a trial, new or changed."""
        before = self.trials.get(trial.number, trial)
        _put(self.trials, trial)
        if trial.origin.promoted_from is not None:
            _put(self._promoted, trial)
        elif trial.kind is TrialKind.CANDIDATE:
            _put(self._candidates, trial)
        if trial.result.outcome.unfinished:
            self.unfinished.add(trial.number)
        else:
            self.unfinished.discard(trial.number)
        counts = bool(eligible([trial]))
        if counts:
            _put(self._completed, trial)
        else:
            self._completed.pop(trial.number, None)
        if trial.kind in MADE_OF_WINNERS:
            self._made.add(trial.number)
        elif trial.origin.promoted_from is None:
            self._standing.take(trial, counts=counts)
        self.changes += 1
        # what is trained again was completed before and may fail now, so both outcomes count
        if (
            Outcome.COMPLETED in (before.result.outcome, trial.result.outcome)
            or trial.origin.promoted_from is not None
        ):
            self._selection = None

    def note_retraining(self, trial: TrialRecord) -> None:
        """Takes in a retraining, new or changed."""
        self.retrainings[trial.number] = trial
        self.changes += 1
        self._selection = None

    def note_comparisons(self, comparisons: tuple[Comparison, ...]) -> None:
        """Takes in how winners compare with the baseline, in place of earlier comparisons."""
        self.head = self.head.replace(comparisons=comparisons)
        self.changes += 1

    def say(self, sentence: str) -> None:
        """Adds a notice, and calls all observers."""
        self.notices.append(sentence)
        self.changes += 1
        self.tell()

    def tell(self) -> None:
        """Calls all observers."""
        for observer in self._observers:
            observer(self)

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are scored."""
        return self.head.finished

    @property
    def candidates(self) -> list[TrialRecord]:
        """Candidates in order of number, without those that were trained once more on all rows."""
        return list(self._candidates.values())

    @property
    def promoted(self) -> list[TrialRecord]:
        """Trainings on all rows of what a search on a part of them has selected, in order."""
        return list(self._promoted.values())

    @property
    def completed(self) -> list[TrialRecord]:
        """Trials with a result of their own or shared, in order."""
        return list(self._completed.values())

    @property
    def searched(self) -> Selection:
        """The selection among the trials of the search, which may have trained on a part of the rows."""
        if self._promoted or not self._made:  # on a part of the rows nothing was made of winners
            return self._standing.selection()
        return self._judge(self.completed)

    @property
    def selection(self) -> Selection:
        """The selection as of now: among trials on all rows alone, as soon as all those promoted have ended."""
        if self._selection is None:
            promoted = self.promoted
            if promoted and not any(trial.result.outcome.unfinished for trial in promoted):
                on_all_rows = self._judge(
                    trial
                    for trial in self.completed
                    if trial.origin.promoted_from is not None or trial.kind in MADE_OF_WINNERS
                )
                if on_all_rows.baseline is not None:
                    self._selection = on_all_rows
            self._selection = self._selection or self.searched
        return self._selection

    def networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """The networks that a trial consists of: the members of an average, or the trial itself."""
        members = (
            *(self.trials[number] for number in trial.origin.members),
            *(self.retrainings[number] for number in trial.origin.retrained_members),
        )
        return members or (trial,)

    def require_baseline(self) -> TrialRecord:
        """The best of the baseline's own trials.

        Raises:
            UserError: if none of them completed.
        """
        if self.selection.baseline is None:
            errors = {trial.result.error for trial in self.trials.values() if trial.result.error}
            raise UserError(f"no training of the baseline completed: {'; '.join(sorted(errors))}.")
        return self.selection.baseline

    def record(self) -> StudyRecord:
        """The study as it stands."""
        selection = self.selection
        front = tuple(trial.number for trial in selection.front)
        choice, baseline = self.head.choice, selection.baseline
        if choice is not None and (
            baseline is None or choice.baseline != baseline.number or choice.front != front
        ):
            choice = None  # what it was made among has changed since
        lowest = selection.front[-1].number if selection.front else None
        return self.head.replace(
            trials=tuple(self.trials.values()),
            retrainings=tuple(trial for _, trial in sorted(self.retrainings.items())),
            baseline=baseline.number if baseline else None,
            front=front,
            networks_front=tuple(trial.number for trial in selection.singles),
            table_bytes_front=tuple(trial.number for trial in selection.by_table_bytes),
            choice=choice,
            best=choice.best if choice else lowest,
            knee=selection.knee.number if selection.knee else None,
            elapsed_seconds=self.elapsed_seconds(),
        )

    def elapsed_seconds(self) -> float:
        """Wall clock of the study's commands, of earlier sessions too."""
        if self._clock is not None:
            return self._clock()
        # a driver that was killed could not note its last trials
        return max(self.head.elapsed_seconds, covered_seconds(self.trials.values()))

    def _judge(self, done: Iterable[TrialRecord]) -> Selection:
        return judged(list(done), self.networks, averages=self._averages)


def _put(into: dict[int, TrialRecord], trial: TrialRecord) -> None:
    """Puts a trial into trials that are in the order of their numbers."""
    late = trial.number not in into and trial.number < next(reversed(into), trial.number)
    into[trial.number] = trial
    if late:
        in_order = sorted(into.items())
        into.clear()
        into.update(in_order)
