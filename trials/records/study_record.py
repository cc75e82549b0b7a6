"""What is known of a study: its trials, its settings, its winners; a plain value, torch-free.

It is made from the ledger; reports, figures, the MLflow log and exports are made from it and from nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property

from pydantic import Field

from dhen.values import Value, omitted
from trials.records.findings import Ablation, Choice, OrderedAxis, Setting, Slices, WinnerVerdict
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.trial_record import MADE_OF_WINNERS, Curve, Metrics, Outcome, TrialKind, TrialRecord


class Comparison(Value):
    """A winner against the baseline on the test split, both retrained from the same seeds."""

    trial: int
    """Number of the winner."""
    seeds: tuple[int, ...]
    """Seeds from which both were trained, with the same order of examples."""
    blocks: int
    """Number of groups of test rows; each group is resampled whole."""
    blocked_by: str
    """What the rows of a group have in common: `time`, `order`, or the name of a column."""
    ne: float
    """NE of the winner on test, mean over seeds."""
    baseline_ne: float
    difference_percent: float
    """NE relative to the baseline's, mean over seeds; negative is better."""
    low_percent: float
    high_percent: float
    """Ends of the two-sided 95 % interval of this comparison alone."""
    p: float
    """Two-sided p-value of this comparison alone."""
    p_adjusted: float
    """p-value after Holm's correction over all winners compared."""
    winners: int
    """Number of winners that were compared."""
    detectable_percent: float
    """The smallest difference that would have been found in 80 % of such comparisons."""
    better: WinnerVerdict
    """Whether the winner is better than the baseline, by the adjusted p at 5 %."""
    refit: bool = omitted(False)
    """Says whether both were trained on the rows of training and validation together, as winners are that are
    trained once more."""


class RefitResult(Value):
    """A trial whose networks were trained once more, on the rows of training and validation together."""

    trial: int
    networks: tuple[int, ...]
    """Numbers of the retrainings that are its networks, in their order."""
    rows: int
    """Number of rows that they were trained on."""
    test: Metrics
    """Metrics on test."""


class ColumnFinding(Value):
    """What was found of a column in the first rows of a log, and the role that it was given."""

    name: str
    role: str
    why: str
    """Reason for the role."""
    distinct: int
    """Number of distinct values in the first rows."""
    missing: float
    """Share of the first rows without a value."""
    example: str
    """One of its values."""


class LogSummary(Value):
    """The log that a study searches on."""

    name: str
    fingerprint: str
    rows: dict[str, int]
    """Number of rows by split: train, validation, test."""
    base_rate: dict[str, float]
    """Fraction of positives by split (weighted, corrected for negative sampling)."""
    tables: int
    numeric: int
    ne_floor: dict[str, float] | None = None
    """Lowest reachable NE by split, if the log carries the true probabilities (the demo log does)."""
    columns: dict[str, str] = Field(default_factory=dict, exclude_if=lambda columns: not columns)
    """Role by name of each column; empty for a log that an older version has summed up."""
    findings: tuple[ColumnFinding, ...] = omitted(())
    """Why columns have their roles, in the log's order; none if a person wrote the schema."""
    notes: tuple[str, ...] = omitted(())
    """Sentences on what was decided or noticed when the log was prepared, the most important first."""


class ClusterSummary(Value):
    """The cluster that candidates are planned for."""

    name: str
    hosts: int
    gpus_per_host: int
    hbm: int
    """Memory of one rank in bytes."""
    verified: bool
    """Whether its numbers were measured on it; false for data sheets."""
    shapes: tuple[str, ...] = omitted(())
    """Shapes that candidates may have, the least first, if there are several (`ranks=1x1,1x2`); `hosts` and
    `gpus_per_host` are those of the least."""

    @property
    def ranks_words(self) -> str:
        """The hosts and ranks of a candidate in words: `2 x 4 ranks`, `1x1, 1x2 or 2x2 ranks`."""
        *smaller, largest = self.shapes or (f"{self.hosts} x {self.gpus_per_host}",)
        return f"{', '.join(smaller)} or {largest} ranks" if smaller else f"{largest} ranks"


class RefusedProposal(Value):
    """A line of `proposals=FILE` that was not trained."""

    line: int
    """Number of the line, from 1 on."""
    key: str
    """Identity of the line, by which it is not answered twice."""
    by: str | None = None
    """Who proposed it, in the line's own words."""
    why: str | None = None
    """Why it was proposed, in the line's own words."""
    reason: str
    """Why it was not trained."""

    @property
    def by_words(self) -> str:
        """` by NAME` if somebody is named."""
        return f" by {self.by}" if self.by else ""


class EarlierStudy(Value):
    """A study of the same log whose candidates this study began with (`warm_start`)."""

    directory: str
    """Directory of the study, as it was given."""
    seed: int
    candidates: int
    """Number of candidates that had begun in that study."""
    reused: int
    """Number of these candidates that this study's sampler reused."""
    left: dict[str, dict[str, int]]
    """Number of candidates that were not reused, by kind of reason and reason."""


class FoundPasses(Value):
    """How many passes over the training rows a study's trainings have, and how the baseline's first trainings
    showed it."""

    passes: int = Field(gt=0)
    """Largest number of passes of every training that does not say another number; of those at constant learning
    rates alone if `falling` is known."""
    reason: str | None = None
    """Why nothing was found out, if that is so: `two of the baseline would take more than 15% of the study's 7
    minutes`."""
    tried: int | None = None
    """Largest number of passes that the baseline was allowed to have."""
    first_ne: float | None = None
    """Lowest NE of the baseline on validation within one pass."""
    lowest_ne: float | None = None
    """Lowest NE of the baseline on validation within all passes that it was allowed to have."""
    lowest_after: float | None = None
    """Number of passes after which the baseline had it."""
    falling: int | None = omitted(None)
    """Number of passes over which learning rates fall to zero in trainings that do not have constant ones; None
    if falling ones were not tried, or not better."""
    falling_ne: float | None = omitted(None)
    """Lowest NE of the baseline on validation if they fall."""
    decays: dict[str, float] = Field(default_factory=dict)
    """Decays of embeddings, by name of the training setting, with which several passes helped; all trainings have
    them, unless the space varies them too."""


class ExpectedGain(Value):
    """What further candidates were expected to gain, if that was too little for the search to go on."""

    percent: float
    """Expected decrease of the lowest NE on validation, in percent of it."""
    candidates: int
    """Number of candidates with a result that this follows from."""
    more: int
    """Number of further candidates that were to gain it."""
    worth_percent: float | None = None
    """Smallest decrease that was worth a longer search (`worth=`); None if none was named."""
    detectable_percent: float | None = None
    """Smallest difference that the log's validation rows can show between two networks like the best; None if
    it could not be measured."""


class StageName(StrEnum):
    """A part of a study's course, in words."""

    PASSES = "number of passes"
    BASELINE = "baseline"
    SEARCH = "search"
    TUNING = "tuning"
    ALL_ROWS = "all rows"
    AVERAGES = "averages"
    DISTILLING = "learning from an average"
    CHOICE = "choice of winners"
    TEST = "scores on test"
    REFIT = "refit on training and validation"
    CONFIRMATION = "confirmation"


class StudyStage(Value):
    """The stage that a study is in, as its driver noted it when the stage began."""

    name: StageName
    total: int | None = None
    """Number of the stage's trainings, those of earlier sessions included; None if it has none to count."""
    done_before: int = 0
    """Number of these that had ended when the stage began in this session."""
    counted_before: int = 0
    """Number of trainings of their kind that the study had then, of whatever stage."""
    began_seconds: float = 0.0
    """`elapsed_seconds` of the study when the stage began in this session."""


class GrownAxis(Value):
    """One step by which a study has widened an axis of its space."""

    axis: str
    """Name of the axis; `layer.KEY` for a setting that each layer has of its own."""
    highest: bool
    """Whether the upper end was widened."""
    before: Setting
    """The axis's end before, as points have it."""
    end: Setting
    """The axis's end from then on, as points have it."""
    value: int | float | tuple[int, ...]
    """The new end as the space has it: widths are a list."""
    count: int
    """Number of the best networks that were at the end before."""
    having: int
    """Number of the best networks that have the axis."""
    completed: int
    """Number of candidates that had completed by then."""
    first: dict[str, Setting] = Field(default_factory=dict)
    """Point of the first candidate beyond the end before: the best one at that end, with the axis moved on."""
    earlier: str | None = None
    """Directory of the earlier study (`warm_start`) that has widened the axis; None if this one has."""


class StudyRecord(Value):
    """A study and all its trials, in order."""

    name: str
    directory: str
    created_at: float | None = None
    """Moment when the study was begun, in seconds since 1970: with the name it tells a study from all others."""
    space: str
    space_file: str | None = None
    """File of the space; None if it is in the catalog."""
    sampler: str
    seed: int
    log: LogSummary
    cluster: ClusterSummary | None = None
    serving: ServingConfig = ServingConfig()
    """Request to an exported model, and its limits."""
    max_table_bytes: int | None = None
    """Limit on the bytes of a candidate's embedding tables; None for no limit."""
    period: str | None = None
    """Length of the periods of validation and test, each scored before it is trained on; None if trained
    networks score them as they are."""
    earlier: tuple[EarlierStudy, ...] = ()
    """Earlier studies that the study was started from."""
    passes: FoundPasses | None = None
    """How many passes trainings have, if `training.epochs` is `auto`; None before that is known."""
    undecayed_under: str | None = None
    """Technique, forced or needed, for which the study does not try `training.table_decay`; None if it may."""
    refused: tuple[RefusedProposal, ...] = ()
    """Lines of `proposals=FILE` that were not trained, each with the reason."""
    axes: tuple[OrderedAxis, ...] = ()
    """The ordered axes of the space, with their ends as they are now."""
    grows: bool = False
    """Whether the study widens axes while it searches."""
    grown: tuple[GrownAxis, ...] = ()
    """Steps by which axes were widened, in order."""
    trials: tuple[TrialRecord, ...]
    baseline: int | None = None
    """Number of the trial that is the tuned baseline."""
    front: tuple[int, ...] = ()
    """Numbers of the candidates, of their averages, and of what learnt from one, on the NE-FLOPs Pareto front, by
    FLOPs."""
    networks_front: tuple[int, ...] = ()
    """Numbers of the networks on the front of networks alone, which averages are no part of, by FLOPs."""
    table_bytes_front: tuple[int, ...] = ()
    """Numbers of the candidates, of their averages, and of what learnt from one, that no other beats in both NE
    and the bytes of embedding tables, by those bytes."""
    choice: Choice | None = None
    """What was chosen of the front before test was looked at; None before that, and once the front has changed."""
    best: int | None = None
    """Number of the best: the one chosen (`choice`); before that the lowest NE of the front."""
    knee: int | None = None
    stage: StudyStage | None = None
    """The stage that the study is in, or was cut short in; None before the first, and once it is finished."""
    finished: bool = False
    finished_at: str | None = None
    """The moment at which the study came to its end for the first time with its budget, ISO 8601, UTC; None
    before."""
    running: bool = True
    """Whether a driver was at work on the study when this record was made."""
    trials_budget: int | None = None
    seconds_budget: float | None = None
    elapsed_seconds: float = 0.0
    """Wall clock of the study's commands, earlier sessions included."""
    expected_gain: ExpectedGain | None = None
    """What ended the search before its budget was spent; None if that was nothing."""
    retrainings: tuple[TrialRecord, ...] = ()
    """Retrainings of winners and the baseline after selection, for intervals and ablations; no candidates."""
    comparisons: tuple[Comparison, ...] = ()
    """Comparisons of winners with the baseline, by FLOPs, once they were retrained (`dhen-search confirm`)."""
    refits: tuple[RefitResult, ...] = ()
    """The baseline and the winners, trained once more on the rows of training and validation together; none if
    the study does not do so (`refit`)."""
    ablations: tuple[Ablation, ...] = ()
    """What the parts of winners are worth, by number of the trial, as far as that was asked
    (`dhen-search ablate`)."""
    slices: tuple[Slices, ...] = ()
    """Winners against the baseline on the slices of columns, by trial and column, as far as that was asked
    (`dhen-search slices`)."""

    @property
    def limits(self) -> Limits:
        """All that candidates may take, but for memory."""
        return Limits(serving=self.serving, max_table_bytes=self.max_table_bytes)

    def comparison(self, number: int | None) -> Comparison | None:
        """Returns the comparison of a winner with the baseline; None if the winner was not retrained."""
        return next((comparison for comparison in self.comparisons if comparison.trial == number), None)

    def refit(self, number: int | None) -> RefitResult | None:
        """Returns what became of a trial on the rows of training and validation together; None if it was not
        trained on them."""
        return next((refit for refit in self.refits if refit.trial == number), None)

    def trial(self, number: int) -> TrialRecord:
        """Returns the trial with this number."""
        return next(trial for trial in self.trials if trial.number == number)

    def retraining(self, number: int) -> TrialRecord:
        """Returns the retraining with this number, which is counted apart from trials."""
        return next(trial for trial in self.retrainings if trial.number == number)

    def baseline_for(self, trial: TrialRecord) -> TrialRecord | None:
        """Returns the tuned baseline, trained on as many rows as the trial was; None if there is none yet."""
        baseline = self._tuned_baseline
        on_all_rows = trial.origin.promoted_from is not None or (
            trial.kind in MADE_OF_WINNERS and bool(self.promoted)
        )
        if baseline is None or (baseline.origin.promoted_from is not None) == on_all_rows:
            return baseline
        return None if baseline.origin.promoted_from is None else self.trial(baseline.origin.promoted_from)

    def networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """Returns the networks that a trial consists of: the members of an average, or the trial itself."""
        origin = trial.origin
        members = (*map(self.trial, origin.members), *map(self.retraining, origin.retrained_members))
        return members or (trial,)

    def exported_networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """Returns the networks that a trial's bundle has: those that were trained once more on the rows of
        training and validation together, if the trial was, else its own."""
        refit = self.refit(trial.number)
        return self.networks(trial) if refit is None else tuple(map(self.retraining, refit.networks))

    @cached_property
    def exportable(self) -> frozenset[int]:
        """Numbers of the trials whose weights are kept: the fronts, the baseline, members of averages."""
        numbers = {*self.front, *self.networks_front, *self.table_bytes_front}
        numbers |= {self.baseline} if self.baseline is not None else set()
        members = (
            number for trial in self.averages if trial.number in numbers for number in trial.origin.members
        )
        return frozenset({*numbers, *members})

    @cached_property
    def candidates(self) -> tuple[TrialRecord, ...]:
        """All trials except those of the baseline's own tuning and the front's second trainings on all rows."""
        candidates = [trial for trial in self.trials if trial.kind is TrialKind.CANDIDATE]
        return tuple([trial for trial in candidates if trial.origin.promoted_from is None])

    @cached_property
    def ended_candidates(self) -> int:
        """Number of candidates that have ended; one that was cut short runs again."""
        return sum(not trial.result.outcome.unfinished for trial in self.candidates)

    @cached_property
    def promoted(self) -> tuple[TrialRecord, ...]:
        """Trainings on all rows of the candidates that the search, on a part of the rows, has selected."""
        return tuple([trial for trial in self.trials if trial.origin.promoted_from is not None])

    @property
    def averages(self) -> tuple[TrialRecord, ...]:
        """The trials that are means of networks."""
        return tuple(trial for trial in self.trials if trial.kind is TrialKind.AVERAGE)

    @property
    def field(self) -> tuple[TrialRecord, ...]:
        """The networks among which best, knee and front are chosen: candidates, trained on all rows once the
        selected ones are, and what learnt from an average of them."""
        distilled = tuple(trial for trial in self.trials if trial.kind is TrialKind.DISTILLED)
        baseline = self._tuned_baseline
        if baseline is None or baseline.origin.promoted_from is None:
            return self.candidates + distilled
        return tuple(trial for trial in self.promoted if trial.kind is TrialKind.CANDIDATE) + distilled

    @property
    def _tuned_baseline(self) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)


def covered_seconds(trials: Iterable[TrialRecord]) -> float:
    """Returns the seconds of wall clock during which at least one of these trials ran, until now."""
    now = datetime.now(UTC).timestamp()
    spans = list[tuple[float, float]]()
    for trial in trials:
        started_at, result = trial.origin.started_at, trial.result
        if started_at is None:
            continue
        start = datetime.fromisoformat(started_at).timestamp()
        if result.outcome is not Outcome.RUNNING and result.seconds:
            spans.append((start, start + result.seconds))
        elif result.outcome is Outcome.RUNNING and not trial.attempts:
            # else it was cut short and goes on: since its first attempt the study may have been away
            spans.append((start, max(start, now)))
    total, covered = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def relative_ne_percent(ne: float, baseline_ne: float) -> float:
    """Returns NE relative to the baseline in percent; negative is better (as the paper's tables give it)."""
    return 100.0 * (ne - baseline_ne) / baseline_ne


def relative_ne_curve(curve: Curve, baseline: Curve) -> tuple[tuple[int, float], ...]:
    """Returns NE relative to the baseline at the same number of examples: pairs (examples, percent).

    Curves are ascending in examples. If the baseline was not evaluated at that very number, its NE is
    interpolated linearly between its neighbours; outside its range there is no value, never an extrapolation.
    """
    examples, baseline_ne = baseline.examples, baseline.ne
    pairs = []
    for seen, ne in zip(curve.examples, curve.ne, strict=True):
        right = bisect_left(examples, seen)
        if right == len(examples) or (right == 0 and examples[0] != seen):
            continue
        left = right if examples[right] == seen else right - 1
        share = (seen - examples[left]) / ((examples[right] - examples[left]) or 1)
        low, high = baseline_ne[left], baseline_ne[right]
        pairs.append((seen, relative_ne_percent(ne, low + share * (high - low))))
    return tuple(pairs)
