"""How a study stands: its trials, and what they say together (the baseline, the front, the time spent)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dhen.errors import UserError
from search.pareto import eligible, knee, pareto_front
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord

MADE_OF_WINNERS = (TrialKind.AVERAGE, TrialKind.SEED)
"""After selection, on as many rows as the winners."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the completed trials say; changes only when one more completes."""

    baseline: TrialRecord | None
    """The best of the baseline's own trials."""
    front: tuple[TrialRecord, ...]
    """Candidates and averages that no other beats in both NE and FLOPs, by FLOPs."""
    knee: TrialRecord | None
    networks: tuple[TrialRecord, ...]
    """The same of candidates alone, by FLOPs: what averages are made of."""
    runners_up: tuple[TrialRecord, ...]
    """What would be so without them, where averages are to be made, which may have them too."""
    seeds: tuple[TrialRecord, ...]
    """Trained again to be members of averages."""
    members: tuple[TrialRecord, ...]
    """Of averages on the front."""

    @property
    def winners(self) -> tuple[TrialRecord, ...]:
        """The baseline and the front: who is scored on test in the end."""
        return (*([self.baseline] if self.baseline else []), *self.front)

    @property
    def trained(self) -> tuple[TrialRecord, ...]:
        """Who must have weights: the baseline, and networks on the front, of themselves or in an average."""
        baseline = [self.baseline] if self.baseline else []
        together = (*baseline, *self.networks, *self.seeds, *self.members)
        return tuple({trial.number: trial for trial in together}.values())

    @property
    def kept(self) -> tuple[TrialRecord, ...]:
        """Whose weights are not dropped: theirs, and those that averages may have besides."""
        return (*self.trained, *self.runners_up)


class Standing:
    """The trials of a study by number; `head` is its record without them."""

    def __init__(self, head: StudyRecord, trials: Iterable[TrialRecord], *, averages: bool = False) -> None:
        """`averages`: whether there are to be some, so that runners-up count."""
        self.head, self._averages = head, averages
        self.trials: dict[int, TrialRecord] = {}
        self._verdict: Verdict | None = None
        for trial in trials:
            self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """A trial, new or changed."""
        before = self.trials.get(trial.number, trial)
        self.trials[trial.number] = trial
        ended = Outcome.COMPLETED in (before.outcome, trial.outcome)  # trained again, it may fail
        if ended or trial.promoted_from is not None:
            self._verdict = None

    @property
    def candidates(self) -> list[TrialRecord]:
        """What was proposed, in order: no trials of the baseline, nor of candidates once more on all rows."""
        own = [t for _, t in sorted(self.trials.items()) if t.promoted_from is None]
        return [t for t in own if t.kind is TrialKind.CANDIDATE]

    @property
    def promoted(self) -> list[TrialRecord]:
        """Those of `search.study.full_data`, on all rows, in order."""
        return [t for _, t in sorted(self.trials.items()) if t.promoted_from is not None]

    @property
    def completed(self) -> list[TrialRecord]:
        """Trials with a result of their own or shared, in order."""
        return eligible(trial for _, trial in sorted(self.trials.items()))

    @property
    def searched(self) -> Verdict:
        """Of the trials that the search has made, on a part of the log where it was told so."""
        on_a_part = bool(self.promoted)
        own = (trial for trial in self.completed if trial.promoted_from is None)
        return self._judged([t for t in own if not (on_a_part and t.kind in MADE_OF_WINNERS)])

    @property
    def verdict(self) -> Verdict:
        """As of now: of trials on all rows alone, as soon as all that were selected have ended there."""
        if self._verdict is None:
            promoted = self.promoted
            going = any(trial.outcome in (Outcome.RUNNING, Outcome.INTERRUPTED) for trial in promoted)
            done = (t for t in self.completed if t.promoted_from is not None or t.kind in MADE_OF_WINNERS)
            whole = self._judged(list(done))
            self._verdict = self.searched if whole.baseline is None or going else whole
        return self._verdict

    def require_baseline(self) -> TrialRecord:
        """The best of the baseline's own trials.

        Raises:
            UserError: where none of them completed.
        """
        if self.verdict.baseline is None:
            errors = {trial.error for trial in self.trials.values() if trial.error}
            raise UserError(f"no training of the baseline completed: {'; '.join(sorted(errors))}.")
        return self.verdict.baseline

    def _is_whole(self, average: TrialRecord) -> bool:
        """Whether all members have a result: not one that is trained again because its weights are gone."""
        return all(self.trials[number].outcome is Outcome.COMPLETED for number in average.members)

    def record(self) -> StudyRecord:
        """The study as it stands."""
        verdict = self.verdict
        return self.head.replace(
            trials=tuple(trial for _, trial in sorted(self.trials.items())),
            baseline=verdict.baseline.number if verdict.baseline else None,
            front=tuple(trial.number for trial in verdict.front),
            best=verdict.front[-1].number if verdict.front else None,
            knee=verdict.knee.number if verdict.knee else None,
            elapsed_seconds=self.elapsed_seconds(),
        )

    def _judged(self, done: Sequence[TrialRecord]) -> Verdict:
        tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
        networks = [trial for trial in done if trial.kind is TrialKind.CANDIDATE]
        averages = [trial for trial in done if trial.kind is TrialKind.AVERAGE and self._is_whole(trial)]
        front, ahead = pareto_front(networks + averages), pareto_front(networks)
        known = {trial.fingerprint for trial in ahead}
        behind = [trial for trial in networks if self._averages and trial.fingerprint not in known]
        return Verdict(
            baseline=min(tuned, key=lambda t: t.validation.ne if t.validation else 0.0, default=None),
            front=tuple(front),
            knee=knee(front),
            networks=tuple(ahead),
            runners_up=tuple(pareto_front(behind)),
            seeds=tuple(trial for trial in done if trial.kind is TrialKind.SEED),
            members=tuple(self.trials[number] for trial in front for number in trial.members),
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


def _span(trial: TrialRecord, now: float) -> tuple[float, float] | None:
    """From when to when a trial ran, in seconds since 1970; one that was cut short will run again."""
    if trial.started_at is None:
        return None
    start = datetime.fromisoformat(trial.started_at).timestamp()
    if trial.outcome is Outcome.RUNNING:
        return start, max(start, now)
    return (start, start + trial.seconds) if trial.seconds else None
