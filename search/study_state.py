"""The state of a study as its driver, its stages and those who watch it share it, and what its trials say
together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dhen.errors import UserError
from search.pareto import eligible, knee, pareto_front
from trials.events import Progress
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import Comparison, StudyRecord, networks_of

Observer = Callable[["StudyState"], None]
"""Is called at every change and about ten times per second between; takes what it likes from the study's state."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the completed trials say; it changes only when one more completes."""

    baseline: TrialRecord | None
    """The best of the baseline's own trials."""
    front: tuple[TrialRecord, ...]
    """Candidates and averages that no other beats in both NE and FLOPs, by FLOPs."""
    knee: TrialRecord | None
    networks: tuple[TrialRecord, ...]
    """The front of candidates alone, by FLOPs: what averages are made of."""
    runners_up: tuple[TrialRecord, ...]
    """The front without these, where averages are to be made, which may have them too."""
    members: tuple[TrialRecord, ...]
    """Networks that averages on the front consist of."""

    @property
    def winners(self) -> tuple[TrialRecord, ...]:
        """The baseline and the front: those that are scored on test in the end."""
        return (*([self.baseline] if self.baseline else []), *self.front)

    @property
    def trained(self) -> tuple[TrialRecord, ...]:
        """Trials that must have weights: the baseline, and networks on the front, by themselves or in an
        average."""
        baseline = [self.baseline] if self.baseline else []
        members = (trial for trial in self.members if trial.kind is not TrialKind.RETRAINING)
        together = (*baseline, *self.networks, *members)
        return tuple({trial.number: trial for trial in together}.values())

    @property
    def kept(self) -> tuple[TrialRecord, ...]:
        """Trials whose weights are not dropped: those, and others that averages may have."""
        return (*self.trained, *self.runners_up)


class StudyState:
    """Trials and retrainings of a study by number, which of them are selected, and what there is to tell of it."""

    def __init__(
        self,
        head: StudyRecord,
        trials: Iterable[TrialRecord],
        retrainings: Iterable[TrialRecord] = (),
        *,
        averages: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        """A study that is opened.

        Args:
            head: its record without trials.
            trials: of earlier sessions.
            retrainings: of earlier sessions.
            averages: whether averages are to be made, so that runners-up count.
            observers: are called by `tell`.
        """
        self.head, self._averages, self._observers = head, averages, observers
        self.trials: dict[int, TrialRecord] = {}
        self.retrainings: dict[int, TrialRecord] = {trial.number: trial for trial in retrainings}
        self.progress: dict[int, Progress] = {}
        """What the trainings that run last said, by trial."""
        self.notices: list[str] = []
        """Sentences beside how trials end, since this driver began."""
        self.ended: list[int] = []
        """Numbers of the trials that this driver has seen end, in that order."""
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
        """Adds a notice; the observers have it at once."""
        self.notices.append(sentence)
        self.changes += 1
        self.tell()

    def tell(self) -> None:
        """Lets the observers look."""
        for observer in self._observers:
            observer(self)

    @property
    def finished(self) -> bool:
        """Whether the budget is spent and the winners are scored."""
        return self.head.finished

    @property
    def candidates(self) -> list[TrialRecord]:
        """What was proposed, in order: no trials of the baseline, nor of candidates once more on all rows."""
        own = [t for _, t in sorted(self.trials.items()) if t.origin.promoted_from is None]
        return [t for t in own if t.kind is TrialKind.CANDIDATE]

    @property
    def promoted(self) -> list[TrialRecord]:
        """Trainings on all rows of what a search on a part of them has selected, in order."""
        return [t for _, t in sorted(self.trials.items()) if t.origin.promoted_from is not None]

    @property
    def completed(self) -> list[TrialRecord]:
        """Trials with a result of their own or shared, in order."""
        return eligible(trial for _, trial in sorted(self.trials.items()))

    @property
    def searched(self) -> Selection:
        """The selection among the trials that the search has made, on a part of the log where it was told so."""
        on_a_part = bool(self.promoted)
        own = (trial for trial in self.completed if trial.origin.promoted_from is None)
        return self._judge([t for t in own if not (on_a_part and t.kind is TrialKind.AVERAGE)])

    @property
    def selection(self) -> Selection:
        """The selection as of now: among trials on all rows alone, as soon as all that were selected have ended
        there."""
        if self._selection is None:
            going = any(trial.result.outcome.unfinished for trial in self.promoted)
            done = (
                t for t in self.completed if t.origin.promoted_from is not None or t.kind is TrialKind.AVERAGE
            )
            whole = self._judge(list(done))
            self._selection = self.searched if whole.baseline is None or going else whole
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
        return self.head.replace(
            trials=tuple(trial for _, trial in sorted(self.trials.items())),
            retrainings=tuple(trial for _, trial in sorted(self.retrainings.items())),
            baseline=selection.baseline.number if selection.baseline else None,
            front=tuple(trial.number for trial in selection.front),
            best=selection.front[-1].number if selection.front else None,
            knee=selection.knee.number if selection.knee else None,
            elapsed_seconds=self.elapsed_seconds(),
        )

    def elapsed_seconds(self) -> float:
        """Wall clock during which at least one trial ran, in earlier sessions too."""
        now = datetime.now(UTC).timestamp()
        spans = sorted(span for trial in self.trials.values() if (span := _span(trial, now)))
        total, covered = 0.0, 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        return total

    def _judge(self, done: Sequence[TrialRecord]) -> Selection:
        tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
        candidates = [trial for trial in done if trial.kind is TrialKind.CANDIDATE]
        averages = [trial for trial in done if trial.kind is TrialKind.AVERAGE and self._is_whole(trial)]
        front, ahead = pareto_front(candidates + averages), pareto_front(candidates)
        known = {trial.job.fingerprint for trial in ahead}
        behind = [trial for trial in candidates if self._averages and trial.job.fingerprint not in known]
        on_front = (trial for trial in front if trial.kind is TrialKind.AVERAGE)
        return Selection(
            baseline=min(tuned, key=_ne, default=None),
            front=tuple(front),
            knee=knee(front),
            networks=tuple(ahead),
            runners_up=tuple(pareto_front(behind)),
            members=tuple(network for average in on_front for network in self.networks(average)),
        )

    def _is_whole(self, average: TrialRecord) -> bool:
        """Whether all members have a result: not one that is trained again because its weights are gone."""
        return all(member.result.outcome is Outcome.COMPLETED for member in self.networks(average))


def _ne(trial: TrialRecord) -> float:
    assert trial.result.validation is not None, "only eligible trials are judged"
    return trial.result.validation.ne


def _span(trial: TrialRecord, now: float) -> tuple[float, float] | None:
    """From when to when a trial ran, in seconds since 1970; one that was cut short will run again."""
    if trial.origin.started_at is None:
        return None
    start, seconds = datetime.fromisoformat(trial.origin.started_at).timestamp(), trial.result.seconds
    if trial.result.outcome is Outcome.RUNNING:
        return start, max(start, now)
    return (start, start + seconds) if seconds else None
