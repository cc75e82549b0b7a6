"""What is known of a study and its trials: plain values, made from the ledger, torch-free.

Reports, figures, the MLflow log and exports are made from these and from nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field

from dhen.cost import CostRow
from dhen.values import Value
from trials.serving_limits import ServingConfig

NAN_AS_WORD = ConfigDict(ser_json_inf_nan="strings")
"""NaN is `"NaN"` in JSON: pydantic's own `null` could not be read back."""


class Outcome(StrEnum):
    """How a trial ended (or that it has not)."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    INFEASIBLE = "infeasible"
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class TrialKind(StrEnum):
    """What a trial is for."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"
    RETRAINING = "retraining"
    """Of a trial's network, after selection: see `Retraining`."""
    AVERAGE = "average"
    """The mean of what several trained networks predict; nothing is trained for it."""
    SEED = "seed"
    """A candidate's network trained once more from another seed, to be a member of averages."""


class Metrics(Value):
    """Quality of predictions on one split."""

    model_config = NAN_AS_WORD

    ne: float
    """Normalized entropy: mean log loss over the entropy of the evaluated split's own base rate."""
    log_loss: float
    """Mean cross-entropy in nats."""
    auc: float
    """Area under the ROC curve."""
    calibration: float
    """Sum of predictions over sum of labels; 1 is calibrated."""
    examples: int
    """Rows evaluated."""


class CurvePoint(Value):
    """One evaluation on validation during training."""

    model_config = NAN_AS_WORD

    examples: int
    """Training examples seen so far (all passes counted)."""
    epoch: float
    """The same in passes over the training split."""
    train_loss: float
    """Mean training log loss since the point before."""
    learning_rate: float
    seconds: float
    """Since training began, evaluation included."""
    validation: Metrics
    averaged: bool = Field(default=False, exclude_if=lambda averaged: not averaged)
    """Whether that is of the mean of the last evaluations' weights, being better than the weights themselves."""


class RejectedStrategy(Value):
    """A memory technique that a plan passed over although it is no more than what was chosen."""

    strategy: str
    memory_bytes: int
    """Predicted peak on the fullest rank."""
    lacking_bytes: int
    """What it exceeds the memory by; 0 where it fits and is slower."""


class PlanSummary(Value):
    """How a candidate is to be trained on the study's cluster; `dhen-search plan` prints the whole ladder."""

    strategy: str | None
    """The memory technique chosen; where nothing fits, the one that lacks least; None: tables alone do not fit."""
    fits: bool
    examples_a_rank: int
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    """Predicted peak on the fullest rank, by item."""
    host_bytes: int = 0
    """Of the host's memory, by one rank, for offload."""
    peak_at: str = ""
    """The moment of the peak."""
    step_seconds: dict[str, float] = Field(default_factory=dict)
    """Predicted, by item; `hidden` is to be taken off."""
    reason: str = ""
    """Why it was chosen, or what it lacks, in a sentence."""
    rejected: tuple[RejectedStrategy, ...] = ()
    """What has no more techniques and was not taken, fewer first; where nothing fits, those with one at most."""
    remedy: str | None = None
    """Where nothing fits: the nearest change that would."""
    faster: str | None = None
    """Where more techniques would be faster: which."""
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """All of `memory_bytes`; None where the tables alone do not fit."""
        return sum(self.memory_bytes.values()) if self.memory_bytes else None

    @property
    def whole_step_seconds(self) -> float | None:
        """All of `step_seconds`, less what is hidden behind compute."""
        items = self.step_seconds
        return sum(items.values()) - 2 * items.get("hidden", 0.0) if items else None


class Attempt(Value):
    """One training of a trial under one strategy: the first, or the next after one ran out of memory."""

    strategy: str
    outcome: Outcome
    predicted_bytes: int | None
    """Peak of the fullest rank, as planned for what it was trained on; None: planned for another cluster."""
    measured_bytes: int | None = None
    """Peak of the fullest rank, where it was counted: on an accelerator, or under a declared memory."""
    needed_bytes: int | None = None
    """Out of memory: what a rank would have held at that moment."""
    limit_bytes: int | None = None
    """Out of memory: what it may hold."""
    predicted_step_seconds: float | None = None
    """As planned for what it was trained on; None: planned for another cluster."""
    measured_step_seconds: float | None = None
    """Median of a step, of a training that ended well."""
    seconds: float | None = None
    """Wall clock."""
    error: str | None = None


class Origin(Value):
    """The trial of another study whose training a result is of."""

    study: str
    """Its name in the shared ledger."""
    directory: str
    """Where that study lay."""
    trial: int


class TrialRecord(Value):
    """One trial, whole. Values not known (yet) are None."""

    number: int
    """0, 1, 2 ... in the order of starting, baseline trials included."""
    kind: TrialKind
    outcome: Outcome
    fingerprint: str
    """Of the job: equal fingerprints are the same training run."""
    point: dict[str, Any]
    """The sampled values, by axis name."""
    model: dict[str, Any]
    """Resolved model configuration."""
    training: dict[str, Any]
    """Resolved training configuration."""
    cost: tuple[CostRow, ...] = ()
    flops: float | None = None
    """Forward FLOPs an example: matmuls, convolutions and attention products; a multiply-add is two."""
    parameters: int | None = None
    """Dense parameters."""
    embedding_parameters: int | None = None
    curve: tuple[CurvePoint, ...] = ()
    validation: Metrics | None = None
    """At the best point of the curve, whose weights are kept."""
    test: Metrics | None = None
    """Only for the baseline and the winners, after selection."""
    examples_per_second: float | None = None
    step_ms: float | None = None
    peak_memory_bytes: int | None = None
    train_seconds: float | None = None
    evaluate_seconds: float | None = None
    seconds: float | None = None
    """Wall clock from start to outcome."""
    planned_technique: str | None = None
    """Memory technique for the study's cluster (`dp`, `zero1`, `fsdp+full_checkpointing`); None: nothing fits."""
    executed_technique: str | None = None
    """What it was trained with here."""
    predicted_peak_bytes: int | None = None
    """On the fullest rank of the study's cluster, as planned; where nothing fits, of what lacks least."""
    predicted_step_seconds: float | None = None
    memory_excess: float | None = None
    """What the sampler learns: memory that is missing over the memory there is, 0 or less where one fits."""
    plan: PlanSummary | None = None
    weights_bytes: int | None = None
    """Size of the exported weights."""
    serving_ms: float | None = None
    """Measured forward time of a request (`StudyRecord.serving`), where that has a limit."""
    serving_excess: float | None = None
    """What the sampler learns: by how much it is over the worst limit of serving, over the limit; 0 or less
    where it meets all that was judged."""
    attempts: tuple[Attempt, ...] = ()
    """Trainings so far, in order; several where one ran out of memory. None of a shared result."""
    reused_from: int | None = None
    """Number of the trial whose result this one shares (the same network)."""
    promoted_from: int | None = None
    """Of a training on all rows: number of the trial on a part of them (`training.train_fraction`) whose
    configuration it is; None of every other."""
    tuned_from: int | None = None
    """Number of the candidate whose architecture this one has, with training settings that are tuned again."""
    reused_from_study: Origin | None = None
    """Where the job was done, if another study did it: its result stands here, and nothing was trained."""
    members: tuple[int, ...] = ()
    """Of an average: numbers of the trials whose predictions it is the mean of."""
    seed_offset: int = 0
    """What the seed of its training has above the study's."""
    error: str | None = None
    """For outcomes other than completed: what happened, in words (and at which step)."""
    expected_ne: float | None = None
    """Of one that was stopped: the lowest validation NE that it was expected to come to."""
    started_at: str | None = None
    """ISO 8601, UTC."""
    sampler_notes: dict[str, int] = Field(default_factory=dict)
    """What the sampler must find again with its proposal when the study is resumed (NSGA-II: its generation)."""

    @property
    def shared(self) -> bool:
        """Whether nothing was trained for it: another trial's result, of this study or of another, is its own."""
        return self.reused_from is not None or self.reused_from_study is not None

    @property
    def owner(self) -> int:
        """Number of the trial in this study whose training, or whose copied weights, this result is of."""
        return self.number if self.reused_from is None else self.reused_from


class Retraining(TrialRecord):
    """A network trained again from another seed once selection is frozen; counted in its own numbers."""

    kind: TrialKind = TrialKind.RETRAINING
    of: int
    """Number of the trial whose network, or whose network in part, it is."""
    seed: int
    removed: str | None = None
    """What was taken out of the network, in an ablation: `layer 1`, `layer 0: attention`."""


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
    gpus_a_host: int
    hbm_bytes: int
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
    retrainings: tuple[Retraining, ...] = ()
    """Of winners and the baseline after selection, for intervals and ablations; no candidates."""
    comparisons: tuple[Comparison, ...] = ()
    """Of winners with the baseline, by FLOPs, once they were retrained (`dhen-search confirm`)."""

    def comparison(self, number: int | None) -> Comparison | None:
        """Of a winner with the baseline; None where it was not retrained."""
        return next((each for each in self.comparisons if each.trial == number), None)

    def trial(self, number: int) -> TrialRecord:
        """The trial with this number."""
        return next(trial for trial in self.trials if trial.number == number)

    def baseline_for(self, trial: TrialRecord) -> TrialRecord | None:
        """The tuned baseline, trained on as many rows as the trial was; None where there is none yet."""
        baseline = self._tuned_baseline
        made_of_winners = trial.kind in (TrialKind.AVERAGE, TrialKind.SEED) and bool(self.promoted)
        on_all_rows = trial.promoted_from is not None or made_of_winners
        if baseline is None or (baseline.promoted_from is not None) == on_all_rows:
            return baseline
        return None if baseline.promoted_from is None else self.trial(baseline.promoted_from)

    def networks(self, trial: TrialRecord) -> tuple[TrialRecord, ...]:
        """What a trial consists of: the members of an average, or itself."""
        return tuple(map(self.trial, trial.members)) or (trial,)

    @property
    def candidates(self) -> tuple[TrialRecord, ...]:
        """All trials but those of the baseline's own tuning, and but the front's once more on all rows."""
        own = (trial for trial in self.trials if trial.promoted_from is None)
        return tuple(trial for trial in own if trial.kind is TrialKind.CANDIDATE)

    @property
    def promoted(self) -> tuple[TrialRecord, ...]:
        """Trainings on all rows of what the search, on a part of them, has selected."""
        return tuple(trial for trial in self.trials if trial.promoted_from is not None)

    @property
    def averages(self) -> tuple[TrialRecord, ...]:
        """Means of networks, and the trainings from other seeds that were made for them."""
        return tuple(trial for trial in self.trials if trial.kind in (TrialKind.AVERAGE, TrialKind.SEED))

    @property
    def field(self) -> tuple[TrialRecord, ...]:
        """The candidates that best, knee and front are of: trained on all rows, once the selected ones are."""
        baseline = self._tuned_baseline
        if baseline is None or baseline.promoted_from is None:
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
