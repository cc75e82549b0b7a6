"""What is known of a study: its trials, its settings, its winners; a plain value, torch-free.

It is made from the ledger; reports, figures, the MLflow log and exports are made from it and from nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from enum import StrEnum

from dhen.values import Value
from trials.record import CurvePoint, TrialKind, TrialRecord
from trials.serving_limits import ServingConfig


class Better(StrEnum):
    """Whether a winner is better than the baseline."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot tell"


class Comparison(Value):
    """A winner against the baseline on the test split, both retrained from the same seeds."""

    trial: int
    """Number of the winner."""
    seeds: tuple[int, ...]
    """From which both were trained, with the same order of examples."""
    blocks: int
    """Of test rows, resampled whole."""
    blocked_by: str
    """What rows of a block have in common: `time`, `order`, or the name of a column."""
    ne: float
    """Of the winner on test, mean over seeds."""
    baseline_ne: float
    difference_percent: float
    """NE relative to the baseline's, mean over seeds; negative is better."""
    low_percent: float
    high_percent: float
    """Ends of the two-sided 95 % interval of this comparison alone."""
    p: float
    """Two-sided, of this comparison alone."""
    p_adjusted: float
    """After Holm's correction over all winners compared."""
    winners: int
    """How many were compared."""
    detectable_percent: float
    """The smallest difference that would have been found in 80 % of such comparisons."""
    better: Better
    """Than the baseline, by the adjusted p at 5 %."""


class LogSummary(Value):
    """The log a study searches on."""

    name: str
    fingerprint: str
    rows: dict[str, int]
    """By split: train, validation, test."""
    base_rate: dict[str, float]
    """Fraction of positives by split (weighted, corrected for negative sampling)."""
    tables: int
    numeric: int
    ne_floor: dict[str, float] | None = None
    """Lowest reachable NE by split, where the log carries the true probabilities (the demo log does)."""


class ClusterSummary(Value):
    """What candidates are planned for."""

    name: str
    hosts: int
    gpus_per_host: int
    hbm: int
    """Memory of one rank."""
    verified: bool
    """Whether its numbers were measured on it; false for data sheets."""


class EarlierStudy(Value):
    """A study of the same log whose candidates this one began with (`warm_start`)."""

    directory: str
    """As it was given."""
    seed: int
    candidates: int
    """That had begun there."""
    reused: int
    """Of these, by this study's sampler."""
    left: dict[str, dict[str, int]]
    """How many of the others were left, by kind of reason and reason."""


def networks_of(
    trial: TrialRecord,
    trial_with: Callable[[int], TrialRecord],
    retraining_with: Callable[[int], TrialRecord],
) -> tuple[TrialRecord, ...]:
    """The networks that a trial consists of: the members of an average, or the trial itself.

    `trial_with` and `retraining_with` find a record by its number; retrainings are numbered apart from trials.
    """
    origin = trial.origin
    members = (*map(trial_with, origin.members), *map(retraining_with, origin.retrained_members))
    return members or (trial,)


class StudyRecord(Value):
    """A study and all its trials, in order."""

    name: str
    directory: str
    space: str
    sampler: str
    seed: int
    log: LogSummary
    cluster: ClusterSummary | None = None
    serving: ServingConfig = ServingConfig()
    """A request to an exported model, and its limits."""
    earlier: tuple[EarlierStudy, ...] = ()
    """What it was started from."""
    trials: tuple[TrialRecord, ...]
    baseline: int | None = None
    """Number of the trial that is the tuned baseline."""
    front: tuple[int, ...] = ()
    """Numbers of the candidates, and of their averages, on the NE-FLOPs Pareto front, by FLOPs."""
    best: int | None = None
    """Number of the one with the lowest validation NE."""
    knee: int | None = None
    finished: bool = False
    running: bool = True
    """Whether a driver was at work on it when this record was made."""
    trials_budget: int | None = None
    seconds_budget: float | None = None
    elapsed_seconds: float = 0.0
    """Wall clock during which at least one trial ran, earlier sessions included."""
    retrainings: tuple[TrialRecord, ...] = ()
    """Of winners and the baseline after selection, for intervals and ablations; no candidates."""
    comparisons: tuple[Comparison, ...] = ()
    """Of winners with the baseline, by FLOPs, once they were retrained (`dhen-search confirm`)."""

    def comparison(self, number: int | None) -> Comparison | None:
        """Of a winner with the baseline; None where it was not retrained."""
        return next((each for each in self.comparisons if each.trial == number), None)

    def trial(self, number: int) -> TrialRecord:
        """The trial with this number."""
        return next(trial for trial in self.trials if trial.number == number)

    def retraining(self, number: int) -> TrialRecord:
        """The retraining with this number, which is counted apart from trials."""
        return next(trial for trial in self.retrainings if trial.number == number)

    def baseline_for(self, trial: TrialRecord) -> TrialRecord | None:
        """The tuned baseline, trained on as many rows as the trial was; None where there is none yet."""
        baseline = self._tuned_baseline
        made_of_winners = trial.kind is TrialKind.AVERAGE and bool(self.promoted)
        on_all_rows = trial.origin.promoted_from is not None or made_of_winners
        if baseline is None or (baseline.origin.promoted_from is not None) == on_all_rows:
            return baseline
        return None if baseline.origin.promoted_from is None else self.trial(baseline.origin.promoted_from)

    def networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """The networks that a trial consists of: the members of an average, or the trial itself."""
        return networks_of(trial, self.trial, self.retraining)

    @property
    def candidates(self) -> tuple[TrialRecord, ...]:
        """All trials but those of the baseline's own tuning, and but the front's once more on all rows."""
        own = (trial for trial in self.trials if trial.origin.promoted_from is None)
        return tuple(trial for trial in own if trial.kind is TrialKind.CANDIDATE)

    @property
    def promoted(self) -> tuple[TrialRecord, ...]:
        """Trainings on all rows of what the search, on a part of them, has selected."""
        return tuple(trial for trial in self.trials if trial.origin.promoted_from is not None)

    @property
    def averages(self) -> tuple[TrialRecord, ...]:
        """The trials that are means of networks."""
        return tuple(trial for trial in self.trials if trial.kind is TrialKind.AVERAGE)

    @property
    def field(self) -> tuple[TrialRecord, ...]:
        """The candidates that best, knee and front are of: trained on all rows, once the selected ones are."""
        baseline = self._tuned_baseline
        if baseline is None or baseline.origin.promoted_from is None:
            return self.candidates
        return tuple(trial for trial in self.promoted if trial.kind is TrialKind.CANDIDATE)

    @property
    def _tuned_baseline(self) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)


def relative_ne_percent(ne: float, baseline_ne: float) -> float:
    """NE relative to the baseline in percent; negative is better (as the paper's tables give it)."""
    return 100.0 * (ne - baseline_ne) / baseline_ne


def relative_ne_curve(
    curve: tuple[CurvePoint, ...], baseline: tuple[CurvePoint, ...]
) -> tuple[tuple[int, float], ...]:
    """NE relative to the baseline at the same number of examples: pairs (examples, percent).

    Curves are ascending in examples. Where the baseline was not evaluated at that very number, its NE is
    interpolated linearly between its neighbours; outside its range there is no value, never an extrapolation.
    """
    seen = [point.examples for point in baseline]
    pairs = []
    for point in curve:
        right = bisect_left(seen, point.examples)
        if right == len(seen) or (right == 0 and seen[0] != point.examples):
            continue
        left = right if seen[right] == point.examples else right - 1
        share = (point.examples - seen[left]) / ((seen[right] - seen[left]) or 1)
        low, high = baseline[left].validation.ne, baseline[right].validation.ne
        pairs.append((point.examples, relative_ne_percent(point.validation.ne, low + share * (high - low))))
    return tuple(pairs)
