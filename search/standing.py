"""How a study stands: its trials, and what they say together (the baseline, the front, the time spent)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from search.front import eligible, knee, pareto_front
from trials.record import Outcome, StudyRecord, TrialKind, TrialRecord


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the completed trials say; changes only when one more completes."""

    baseline: TrialRecord | None
    """The best of the baseline's own trials."""
    front: tuple[TrialRecord, ...]
    """Candidates that no other beats in both NE and FLOPs, by FLOPs."""
    knee: TrialRecord | None

    @property
    def winners(self) -> tuple[TrialRecord, ...]:
        """The baseline and the front: whose weights are kept, and who is scored on test in the end."""
        return (*([self.baseline] if self.baseline else []), *self.front)


class Standing:
    """The trials of a study by number; `head` is its record without them."""

    def __init__(self, head: StudyRecord, trials: Iterable[TrialRecord]) -> None:
        self.head = head
        self.trials: dict[int, TrialRecord] = {}
        self._verdict: Verdict | None = None
        for trial in trials:
            self.note(trial)

    def note(self, trial: TrialRecord) -> None:
        """A trial, new or changed."""
        self.trials[trial.number] = trial
        if trial.outcome is Outcome.COMPLETED or trial.promoted_from is not None:
            self._verdict = None

    @property
    def candidates(self) -> list[TrialRecord]:
        """What was proposed, in order: no trials of the baseline, nor of candidates once more on all rows."""
        own = [t for _, t in sorted(self.trials.items()) if t.promoted_from is None]
        return [t for t in own if t.kind is TrialKind.CANDIDATE]

    @property
    def promoted(self) -> list[TrialRecord]:
        """Those of `search.promotion`, on all rows, in order."""
        return [t for _, t in sorted(self.trials.items()) if t.promoted_from is not None]

    @property
    def completed(self) -> list[TrialRecord]:
        """Trials with a result of their own or shared, in order."""
        return eligible(trial for _, trial in sorted(self.trials.items()))

    @property
    def searched(self) -> Verdict:
        """Of the trials that the search has made, on a part of the log where it was told so."""
        return _verdict([trial for trial in self.completed if trial.promoted_from is None])

    @property
    def verdict(self) -> Verdict:
        """As of now: of trials on all rows alone, as soon as all that were selected have ended there."""
        if self._verdict is None:
            promoted = self.promoted
            whole = _verdict(eligible(promoted))
            going = any(trial.outcome in (Outcome.RUNNING, Outcome.INTERRUPTED) for trial in promoted)
            self._verdict = self.searched if whole.baseline is None or going else whole
        return self._verdict

    def record(self) -> StudyRecord:
        """The study as it stands."""
        verdict = self.verdict
        return self.head.model_copy(
            update={
                "trials": tuple(trial for _, trial in sorted(self.trials.items())),
                "baseline": verdict.baseline.number if verdict.baseline else None,
                "front": tuple(trial.number for trial in verdict.front),
                "best": verdict.front[-1].number if verdict.front else None,
                "knee": verdict.knee.number if verdict.knee else None,
                "elapsed_seconds": self.elapsed_seconds(),
            }
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


def _verdict(done: Sequence[TrialRecord]) -> Verdict:
    tuned = [trial for trial in done if trial.kind is TrialKind.BASELINE]
    front = pareto_front(trial for trial in done if trial.kind is TrialKind.CANDIDATE)
    return Verdict(
        baseline=min(tuned, key=lambda t: t.validation.ne if t.validation else 0.0, default=None),
        front=tuple(front),
        knee=knee(front),
    )


def _span(trial: TrialRecord, now: float) -> tuple[float, float] | None:
    """From when to when a trial ran, in seconds since 1970; one that was cut short will run again."""
    if trial.started_at is None:
        return None
    start = datetime.fromisoformat(trial.started_at).timestamp()
    if trial.outcome is Outcome.RUNNING:
        return start, max(start, now)
    return (start, start + trial.seconds) if trial.seconds else None
