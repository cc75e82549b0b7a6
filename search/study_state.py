"""The state of a study, shared by its driver, its stages and its observers, and what follows from its trials
together."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dhen.errors import UserError
from search.pareto import eligible, front_of, knee, ne_of, table_bytes_front_of
from trials.choice import Choice
from trials.events import Progress
from trials.record import MADE_OF_WINNERS, Outcome, TrialKind, TrialRecord
from trials.study_record import Comparison, StudyRecord, networks_of

CONTENDERS = 5
"""Number of networks of the lowest NE whose weights are kept, on the front or not: what choosing the lowest of
many makes of its NE is worked out from what they predict."""
Observer = Callable[["StudyState"], None]
"""A function that is called with the study's state at every change, and about ten times per second between."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What follows from the completed trials; it changes only when one more trial completes."""

    baseline: TrialRecord | None
    """The best of the baseline's own trials."""
    front: tuple[TrialRecord, ...]
    """Candidates, averages, and networks that learnt from one, that no other beats in both NE and FLOPs; by
    FLOPs."""
    knee: TrialRecord | None
    networks: tuple[TrialRecord, ...]
    """The front of candidates alone, by FLOPs, which averages are made of."""
    singles: tuple[TrialRecord, ...]
    """The front of all networks by themselves, by FLOPs: candidates, and what learnt from an average."""
    by_table_bytes: tuple[TrialRecord, ...]
    """What no other beats in both NE and table bytes, of all that the front is of; by table bytes."""
    runners_up: tuple[TrialRecord, ...]
    """The front of all other candidates, where averages are to be made, which may have these networks too."""
    contenders: tuple[TrialRecord, ...]
    """Candidates of the lowest NE, whatever their FLOPs."""
    members: tuple[TrialRecord, ...]
    """Networks of which averages on the front, or on that of table bytes, consist."""

    @property
    def trained(self) -> tuple[TrialRecord, ...]:
        """Trials that must have weights: the baseline, and networks on the front, by themselves or in an
        average."""
        baseline = [self.baseline] if self.baseline else []
        members = (trial for trial in self.members if trial.kind is not TrialKind.RETRAINING)
        together = (*baseline, *self.networks, *self.singles, *members)
        return tuple({trial.number: trial for trial in together}.values())

    @property
    def averages(self) -> tuple[TrialRecord, ...]:
        """Averages on the front, or on that of table bytes."""
        on_fronts = {trial.number: trial for trial in (*self.front, *self.by_table_bytes)}
        return tuple(trial for trial in on_fronts.values() if trial.kind is TrialKind.AVERAGE)

    @property
    def exported(self) -> tuple[TrialRecord, ...]:
        """Trials that must have weights because they may be exported: the trained ones, and networks on the front
        of table bytes, which no later stage trains again or scores."""
        by_tables = (trial for trial in self.by_table_bytes if trial.kind is not TrialKind.AVERAGE)
        return tuple({trial.number: trial for trial in (*self.trained, *by_tables)}.values())

    @property
    def kept(self) -> tuple[TrialRecord, ...]:
        """Trials whose weights are not dropped: those that may be exported, and others that are averaged or
        compared."""
        return (*self.exported, *self.runners_up, *self.contenders)


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
        self._selection: Selection | None = None
        for trial in trials:
            self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """Takes in a trial, new or changed."""
        before = self.trials.get(trial.number, trial)
        self.trials[trial.number] = trial
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
        searched = [trial for trial in self._in_order() if trial.origin.promoted_from is None]
        return [trial for trial in searched if trial.kind is TrialKind.CANDIDATE]

    @property
    def promoted(self) -> list[TrialRecord]:
        """Trainings on all rows of what a search on a part of them has selected, in order."""
        return [trial for trial in self._in_order() if trial.origin.promoted_from is not None]

    def _in_order(self) -> list[TrialRecord]:
        return [self.trials[number] for number in sorted(self.trials)]

    @property
    def completed(self) -> list[TrialRecord]:
        """Trials with a result of their own or shared, in order."""
        return eligible(self._in_order())

    @property
    def searched(self) -> Selection:
        """The selection among the trials of the search, which may have trained on a part of the rows."""
        on_a_part = bool(self.promoted)
        searched = (trial for trial in self.completed if trial.origin.promoted_from is None)
        return self._judge([trial for trial in searched if not (on_a_part and trial.kind in MADE_OF_WINNERS)])

    @property
    def selection(self) -> Selection:
        """The selection as of now: among trials on all rows alone, as soon as all those promoted have ended."""
        if self._selection is None:
            self._selection = self._on_all_rows() or self.searched
        return self._selection

    def networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """The networks that a trial consists of: the members of an average, or the trial itself."""
        return networks_of(trial, self.trials.__getitem__, self.retrainings.__getitem__)

    def require_baseline(self) -> TrialRecord:
        """The best of the baseline's own trials.

        Raises:
            UserError: where none of them completed.
        """
        if self.selection.baseline is None:
            errors = {trial.result.error for trial in self.trials.values() if trial.result.error}
            raise UserError(f"no training of the baseline completed: {'; '.join(sorted(errors))}.")
        return self.selection.baseline

    def record(self) -> StudyRecord:
        """The study as it stands."""
        selection = self.selection
        choice = self._standing_choice(selection)
        lowest = selection.front[-1].number if selection.front else None
        return self.head.replace(
            trials=tuple(self._in_order()),
            retrainings=tuple(trial for _, trial in sorted(self.retrainings.items())),
            baseline=selection.baseline.number if selection.baseline else None,
            front=tuple(trial.number for trial in selection.front),
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

    def _standing_choice(self, selection: Selection) -> Choice | None:
        """The choice that was made; None where the front or the baseline has changed since."""
        choice, baseline = self.head.choice, selection.baseline
        if choice is None or baseline is None or choice.baseline != baseline.number:
            return None
        return choice if choice.front == tuple(trial.number for trial in selection.front) else None

    def _on_all_rows(self) -> Selection | None:
        """The selection among trials on all rows; None until all those promoted have ended."""
        promoted = self.promoted
        if not promoted or any(trial.result.outcome.unfinished for trial in promoted):
            return None
        done = (
            trial
            for trial in self.completed
            if trial.origin.promoted_from is not None or trial.kind in MADE_OF_WINNERS
        )
        selection = self._judge(list(done))
        return selection if selection.baseline is not None else None

    def _judge(self, done: Sequence[TrialRecord]) -> Selection:
        tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
        candidates = [trial for trial in done if trial.kind is TrialKind.CANDIDATE]
        averages = [trial for trial in done if trial.kind is TrialKind.AVERAGE and self._is_whole(trial)]
        taught = [trial for trial in done if trial.kind is TrialKind.DISTILLED]
        networks = front_of(candidates)
        field = candidates + averages + taught if averages else candidates
        front = front_of(field) if averages else networks
        by_table_bytes = table_bytes_front_of(field)
        fingerprints = {trial.job.fingerprint for trial in networks}
        others = [
            trial for trial in candidates if self._averages and trial.job.fingerprint not in fingerprints
        ]
        distinct = {trial.job.fingerprint: trial for trial in reversed(candidates)}
        on_fronts = {
            trial.number: trial for trial in (*front, *by_table_bytes) if trial.kind is TrialKind.AVERAGE
        }
        return Selection(
            baseline=min(tuned, key=ne_of, default=None),
            front=tuple(front),
            knee=knee(front),
            networks=tuple(networks),
            singles=tuple(front_of(candidates + taught) if taught else networks),
            by_table_bytes=tuple(by_table_bytes),
            runners_up=tuple(front_of(others)),
            contenders=tuple(heapq.nsmallest(CONTENDERS, distinct.values(), key=ne_of)),
            members=tuple(network for average in on_fronts.values() for network in self.networks(average)),
        )

    def _is_whole(self, average: TrialRecord) -> bool:
        """Whether all members have a result; a member that is trained again for its lost weights has none."""
        return all(member.result.outcome is Outcome.COMPLETED for member in self.networks(average))


def covered_seconds(trials: Iterable[TrialRecord]) -> float:
    """Wall clock during which at least one of these trials ran, until now."""
    now = datetime.now(UTC).timestamp()
    spans = sorted(span for trial in trials if (span := _span(trial, now)))
    total, covered = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _span(trial: TrialRecord, now: float) -> tuple[float, float] | None:
    """Start and end of a trial in seconds since 1970; None for one that was cut short, which will run again."""
    if trial.origin.started_at is None:
        return None
    start, seconds = datetime.fromisoformat(trial.origin.started_at).timestamp(), trial.result.seconds
    if trial.result.outcome is Outcome.RUNNING:
        return start, max(start, now)
    return (start, start + seconds) if seconds else None
