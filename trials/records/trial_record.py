"""What is known of one trial: a plain value, made by the driver, kept by the ledger, torch-free.

A record is nested, so that what belongs together changes together: a result that another trial takes over, a plan
that a next attempt replaces, a job that is written to a table are one field each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, overload

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from dhen.cost import CostRow, shared, table_bytes
from dhen.values import Value, omitted
from trials.records.strategy import named

MOST_EXAMPLES = 2**53
"""Largest number of examples: more are no whole number in floating point, as which a curve keeps them."""
NAN_AS_WORD = ConfigDict(ser_json_inf_nan="strings")
"""NaN as `"NaN"` in JSON: pydantic's own `null` could not be read back."""


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

    @property
    def unfinished(self) -> bool:
        """Whether the trial runs, or was cut short and runs again when its study is resumed."""
        return self in (Outcome.RUNNING, Outcome.INTERRUPTED)

    @property
    def may_be_tried_again(self) -> bool:
        """Whether an attempt that ended so may be followed by another one of the same trial."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.INTERRUPTED)

    @property
    def holds_for_equal_jobs(self) -> bool:
        """Whether a trial of an equal job takes the result over in place of training."""
        return self in (Outcome.COMPLETED, Outcome.STOPPED)

    @property
    def is_final(self) -> bool:
        """Whether the same job, trained again to its end, would come to the same outcome."""
        return self in (Outcome.COMPLETED, Outcome.DIVERGED)


class TrialKind(StrEnum):
    """What a trial is for."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"
    RETRAINING = "retraining"
    """A trial's network trained once more from another seed, after selection (intervals, ablations, averages)."""
    AVERAGE = "average"
    """The mean of what several trained networks predict; nothing is trained for it."""
    DISTILLED = "distilled"
    """A candidate's network trained once more, after the search, on labels that an average has softened."""


MADE_OF_WINNERS = (TrialKind.AVERAGE, TrialKind.DISTILLED)
"""Kinds of trials that are made once the search has ended, of what it has selected."""


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
    examples: int = Field(ge=0, le=MOST_EXAMPLES)
    """Rows evaluated."""


class CurvePoint(Value):
    """One evaluation on validation during training."""

    model_config = NAN_AS_WORD

    examples: int = Field(ge=0, le=MOST_EXAMPLES)
    """Training examples seen so far (all passes counted)."""
    epoch: float
    """Passes over the training split so far."""
    train_loss: float
    """Mean training log loss since the point before."""
    learning_rate: float
    """Learning rate of the dense part at the last step before the evaluation."""
    seconds: float
    """Seconds since training began, evaluation included."""
    validation: Metrics
    averaged: bool = omitted(False)
    """Whether the metrics are of the mean of the last evaluations' weights, being better than the weights
    themselves."""
    clipped: float | None = omitted(None)
    """Share of the steps since the point before whose gradients were clipped; None without
    `training.clip_norm`."""


class Curve(Sequence[CurvePoint]):
    """Evaluations on validation as one array of numbers, of which points are made as they are asked for.

    It is kept of thousands of trials: the points themselves, with their metrics, take twenty times as much memory.
    In JSON, and if a record is given one, it is a list of points.
    """

    __slots__ = ("_numbers",)

    def __init__(self, points: Iterable[CurvePoint] = ()) -> None:
        """A curve of points, ascending in examples."""
        self._numbers = array("d")
        for point in points:
            quality, clipped = point.validation, _NOT_CLIPPED if point.clipped is None else point.clipped
            numbers = (
                *(point.examples, point.epoch, point.train_loss, point.learning_rate, point.seconds),
                *(quality.ne, quality.log_loss, quality.auc, quality.calibration, quality.examples),
                *(point.averaged, clipped),
            )
            self._numbers.extend(numbers)

    @property
    def examples(self) -> list[int]:
        """Training examples seen at each point."""
        return list(map(int, self._numbers[0::_WIDTH]))

    @property
    def ne(self) -> Sequence[float]:
        """NE on validation at each point; NaN if it is none."""
        return self._numbers[_NE::_WIDTH]

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> CurvePoint: ...

    @overload
    def __getitem__(self, index: slice) -> Curve: ...

    def __getitem__(self, index: int | slice) -> CurvePoint | Curve:
        places = range(len(self))[index]
        if isinstance(places, range):
            part = Curve()
            for place in places:
                part._numbers += self._numbers[place * _WIDTH : (place + 1) * _WIDTH]
            return part
        numbers = self._numbers[places * _WIDTH : (places + 1) * _WIDTH]
        examples, epoch, train_loss, learning_rate, seconds, *quality, averaged, clipped = numbers
        ne, log_loss, auc, calibration, rows = quality
        return CurvePoint(
            examples=int(examples),
            epoch=epoch,
            train_loss=train_loss,
            learning_rate=learning_rate,
            seconds=seconds,
            validation=Metrics(
                ne=ne, log_loss=log_loss, auc=auc, calibration=calibration, examples=int(rows)
            ),
            averaged=bool(averaged),
            clipped=None if clipped == _NOT_CLIPPED else clipped,
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return len(self) == len(other) and self == Curve(other)
        if not isinstance(other, Curve):
            return NotImplemented
        # as bytes, for NaN equals itself here: the same curve read twice is no other one
        return self._numbers.tobytes() == other._numbers.tobytes()

    def __hash__(self) -> int:
        return hash(self._numbers.tobytes())

    def __repr__(self) -> str:
        return repr(tuple(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        points = handler.generate_schema(tuple[CurvePoint, ...])
        return core_schema.no_info_wrap_validator_function(
            lambda value, validate: value if isinstance(value, cls) else cls(validate(value)),
            points,
            serialization=core_schema.plain_serializer_function_ser_schema(tuple, return_schema=points),
        )


_WIDTH, _NE, _NOT_CLIPPED = 12, 5, -1.0
"""Number of a point's numbers, the place of NE among them, and what stands for a share of clipped steps if
nothing is clipped."""


class Refit(Value):
    """How long a training on the rows of training and validation together goes on: as an earlier training, on
    training rows alone, had come to its best. No rows are left that could tell it."""

    evaluations: int = Field(gt=0)
    """Number of the best evaluation, from 1 on; evaluations lie at the same shares of the passes."""
    lowered_after: tuple[int, ...] = omitted(())
    """Numbers of the evaluations before it after which learning rates were lowered."""
    evaluate_every: int | None = omitted(None, gt=0)
    """Number of examples from one of them to the next, if the rows of validation make it another than the
    training's."""
    weight_average: int | None = omitted(None, ge=2)
    """Number of the last evaluations whose weights' mean is kept, if the training has none
    (`weight_average`)."""

    @classmethod
    def of(cls, curve: Curve) -> Refit:
        """Returns how the training with this curve, which has a point at least, had come to its best."""
        best, lowered = 0, list[int]()
        for number, ne in enumerate(curve.ne):
            if number == 0 or ne < curve.ne[best]:
                best = number
            else:
                lowered.append(number + 1)
        return cls(evaluations=best + 1, lowered_after=tuple(number for number in lowered if number <= best))


class JobSummary(Value):
    """What a trial trains, as its record keeps it (`trials.records.job.Job` is the whole of it). Empty if
    the trial's point gives no model."""

    fingerprint: str = ""
    """Identity of the job: equal fingerprints are the same training run."""
    seed: int = 0
    """Seed of the initial weights, the order of examples and dropout."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Resolved model configuration."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Resolved training configuration."""
    cost: tuple[CostRow, ...] = ()
    """The model's cost table, a row per operation."""
    flops: float | None = None
    """Forward FLOPs per example: matmuls, convolutions and attention products; a multiply-add is two."""
    parameters: int | None = None
    """Number of dense parameters."""
    embedding_parameters: int | None = None
    """Number of parameters in embedding tables."""
    weights_bytes: int | None = None
    """Size of the exported weights."""
    table_bytes: int | None = None
    """Size of the embedding tables as training stores them (`dhen.cost.table_bytes`). It follows from the fields
    above; an average, which has no training of its own, says the sum over its networks."""
    origin: int | None = omitted(None)
    """Number of the training rows that it is trained on as if the log had ended there; None: the whole log."""
    refit: Refit | None = omitted(None)
    """How long it is trained on the rows of training and validation together; None: on those of training alone."""
    teacher: str | None = omitted(None)
    """Fingerprint of the average that has softened the labels; None: they are the log's."""
    period: str | None = omitted(None)
    """Length of the periods of validation and test, each scored before it is trained on; None: they are scored by
    the trained weights as they are."""

    @field_validator("cost")
    @classmethod
    def _in_common(cls, cost: tuple[CostRow, ...]) -> tuple[CostRow, ...]:
        return tuple(map(shared, cost))

    @model_validator(mode="before")
    @classmethod
    def _with_table_bytes(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("table_bytes") is not None:
            return data
        parameters, training = data.get("embedding_parameters"), data.get("training")
        if parameters is None or not training:
            return data
        return data | {"table_bytes": table_bytes(parameters, training.get("table_precision", "fp32"))}


class RejectedStrategy(Value):
    """A strategy that a plan passed over although it has no more techniques than the chosen one."""

    strategy: str
    memory_bytes: int
    """Predicted peak on the fullest rank."""
    lacking_bytes: int
    """Bytes by which the strategy exceeds the memory; 0 if it fits and is slower."""
    items: dict[str, int] = Field(default_factory=dict, exclude_if=lambda items: not items)
    """Predicted bytes by item, of the peak on the fullest rank, without those that are 0; kept of one strategy of
    each way to hold the model, and empty for others and in records of older versions."""
    reason: str = omitted("")
    """What the strategy needs and what takes most, in a sentence; kept if items are."""
    step_seconds: float | None = omitted(None)
    """Predicted seconds of a step; kept if items are."""

    @property
    def held_as(self) -> str:
        """The strategy without its micro-batches and the size of a cache: how it holds the model."""
        return named(self.strategy).held_as


class PlanSummary(Value):
    """How a candidate is to be trained on the study's cluster; `dhen-search plan` prints the whole ladder."""

    strategy: str | None
    """The strategy chosen; if nothing fits, the one that lacks least; None: the tables alone do not fit."""
    ranks: str | None = omitted(None)
    """Shape that the plan is for: hosts x ranks per host, such as 2x4; None in records of older versions, if
    all trials have the study's one shape."""
    other_shapes: tuple[str, ...] = omitted(())
    """Of each other shape that was tried (`ranks=1x1,1x2`), why it does not do, in a sentence."""
    fits: bool
    """Whether any strategy fits."""
    examples_per_rank: int
    """Examples of a batch that each rank trains on."""
    memory_bytes: dict[str, int] = Field(default_factory=dict)
    """Predicted peak on the fullest rank, by item."""
    host_bytes: int = 0
    """Bytes of the host's memory that one rank takes for offload."""
    peak_at: str = ""
    """The moment of the peak."""
    step_seconds: dict[str, float] = Field(default_factory=dict)
    """Predicted seconds of a step, by item; `hidden` is to be taken off."""
    table_hit_rate: float | None = omitted(None)
    """Predicted share of the ids looked up whose row is in the cache, if tables lie below the device."""
    reason: str = ""
    """Why the strategy was chosen, or what it lacks, in a sentence."""
    rejected: tuple[RejectedStrategy, ...] = ()
    """Strategies with no more techniques that were not chosen, fewer techniques first; if nothing fits, those
    with one at most."""
    remedy: str | None = None
    """The nearest change that would fit, if nothing fits; else None."""
    faster: str | None = None
    """The strategy with more techniques that would be faster, if there is one; else None."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the plan besides."""
    restricted_to: str | None = None
    """Name of the strategy that the ladder was restricted to (`technique=`)."""
    memory_margin: int = 0
    """Bytes that were added to every predicted peak (`memory_margin=`); below 0 they were taken off."""
    margin_bytes: int = 0
    """Bytes that were added to the predicted peak for the verdict: `memory_margin`, and what attempts so far had
    needed beyond their plans."""
    ran_out: tuple[str, ...] = ()
    """Names of the strategies that had been tried before and had run out of memory."""

    @property
    def forced(self) -> bool:
        """Whether a user asked for something that makes candidates be held otherwise than the planner would."""
        return self.restricted_to is not None or self.memory_margin != 0

    @property
    def peak_bytes(self) -> int | None:
        """The sum of `memory_bytes`; None if the tables alone do not fit."""
        return sum(self.memory_bytes.values()) if self.memory_bytes else None

    @property
    def whole_step_seconds(self) -> float | None:
        """The sum of `step_seconds`, less what is hidden behind compute."""
        items = self.step_seconds
        return sum(items.values()) - 2 * items.get("hidden", 0.0) if items else None


class TrialPlan(Value):
    """What is known of a trial before it trains: how it is to be held, what that takes, what serving takes."""

    technique: str | None = "dp"
    """Strategy for the study's cluster, by name (`dp`, `zero1`, `fsdp+full_checkpointing`); None: nothing fits.
    After an attempt that ran out of memory, the strategy of the next one."""
    ranks: str | None = omitted(None)
    """Shape that the trial is to be trained in: hosts x ranks per host, such as 2x4; None: the study's one, if
    nothing was planned or by an older version."""
    peak_bytes: int | None = None
    """Predicted peak on the fullest rank of the study's cluster; if nothing fits, that of the strategy that
    lacks least."""
    step_seconds: float | None = None
    """Predicted seconds of a step."""
    memory_excess: float | None = None
    """Missing memory over available memory, which the sampler learns; 0 or less if a strategy fits."""
    serving_ms: float | None = None
    """Measured forward time of a request (`StudyRecord.serving`), if that has a limit."""
    serving_excess: float | None = None
    """Part by which the model exceeds the worst limit of serving or of table bytes, over that limit, which the
    sampler learns; 0 or less if it meets all that was judged."""
    summary: PlanSummary | None = None
    """The plan that the trial is held by: its items, its reasons, what it passed over. Each attempt keeps its own
    (`Attempt.plan`)."""

    @property
    def unsized_technique(self) -> str | None:
        """The strategy without the size of a cache, by which trials are counted; None: nothing fits."""
        return named(self.technique).unsized_name if self.technique is not None else None


class Measurements(Value):
    """What a training measured of itself. A number that is added here is in the ledger, in MLflow and in
    `status --json` without further ado (`docs/architecture.md`)."""

    examples_per_second: float | None = None
    """Median over the stretches between evaluations, evaluation excluded."""
    step_ms: float | None = None
    """Milliseconds of a training step, from the same median."""
    peak_memory_bytes: int | None = None
    """Peak of the fullest rank: allocated memory of the device; on a CPU what was counted if a limit is
    declared, else the highest resident memory of the process."""
    train_seconds: float | None = None
    """Seconds of training, evaluation excluded."""
    evaluate_seconds: float | None = None
    """Seconds of evaluation."""
    table_hit_rate: float | None = omitted(None)
    """Share of the ids looked up in training whose row was in the cache on the device, if tables lie below."""
    table_rows_copied: float | None = omitted(None)
    """Rows copied to the cache and from it, per training step."""
    staleness: dict[int, int] | None = omitted(None)
    """How often the rows of a batch lacked the updates of so many earlier steps, if servers hold the tables;
    under `synchrony=async`, how often so many other batches were handed out while one was trained on."""
    lost_steps: int | None = omitted(None)
    """Number of steps whose updates were lost, if servers hold the tables: of some rows with a server that was
    killed and came back from what it had saved, or of a whole batch with a rank on its own that was killed."""
    cut_after: int | None = omitted(None)
    """Number of examples after which the training was stopped, since its part of the study's minutes was over;
    None if it came to its own end."""

    @property
    def numbers(self) -> dict[str, float | None]:
        """All that was measured, by name, each as one number: of a distribution its mean."""
        numbers: dict[str, float | None] = {}
        for name, value in self:
            if isinstance(value, dict):
                value = sum(at * count for at, count in value.items()) / max(1, sum(value.values()))
            numbers[name] = value
        return numbers

    @property
    def whole_seconds(self) -> float:
        """Seconds of training and evaluation together; 0 if nothing was measured."""
        return (self.train_seconds or 0.0) + (self.evaluate_seconds or 0.0)


class Result(Value):
    """What came of a trial. Values that are not known (yet) are None."""

    outcome: Outcome = Outcome.RUNNING
    error: str | None = None
    """For outcomes other than completed: what happened, in words (and at which step)."""
    curve: Curve = Curve()
    """Evaluations on validation, ascending in examples."""
    validation: Metrics | None = None
    """Metrics at the best point of the curve, whose weights are kept; of a job with a `period`, those of the
    periods that these weights have scored ahead."""
    test: Metrics | None = None
    """Metrics on the test split: only of the baseline and the winners, after selection."""
    expected_ne: float | None = None
    """For a stopped trial: the lowest validation NE that it was expected to come to."""
    technique: str | None = None
    """Strategy that the trial was trained under here, by name, as its ranks read it from their wrapped modules;
    None until they have."""
    measured: Measurements = Measurements()
    """What the training measured of itself."""
    seconds: float | None = None
    """Wall clock from start to outcome."""

    @property
    def training_seconds(self) -> float:
        """Seconds that the training took, here or in the study that it was taken over from; 0 if none was."""
        return max(self.seconds or 0.0, self.measured.whole_seconds)

    @property
    def whole_seconds(self) -> float:
        """Seconds that the training would have taken to the end of its pass, had it not been cut."""
        epoch = self.curve[-1].epoch if self.measured.cut_after is not None and self.curve else 1.0
        return self.training_seconds / max(min(epoch, 1.0), 1e-9)

    @property
    def not_begun(self) -> bool:
        """Whether the training would have outlasted its part of the study's minutes."""
        return (self.error or "").startswith(NOT_BEGUN)

    def taken_over(self) -> Result:
        """Returns the result as another trial has it: that trial took no time, and its look at test is its own."""
        return self.replace(test=None, seconds=0.0)


NOT_BEGUN = "not begun, for want of time"
"""Beginning of the error of a trial that would have outlasted its part of the study's minutes."""
DRIVER_DIED = "its driver died"
"""Beginning of the error of an attempt whose driver died, in a study that has several drivers."""
MOVED = "so it goes on elsewhere"
"""End of the error of an attempt that was ended because a rank was slow, and that others follow on other hosts."""


class Attempt(Value):
    """One execution of a trial under one strategy: the first, or the next after one ran out of memory."""

    strategy: str
    """Strategy that the ranks were asked to hold the model with, by name."""
    executed: str | None = None
    """Strategy that the ranks read from their wrapped modules and their optimizer; None if the attempt ended
    before they could."""
    plan: PlanSummary | None = None
    """Plan that the attempt was held by; None: planned for another cluster."""
    outcome: Outcome
    predicted_bytes: int | None
    """Peak of the fullest rank, as planned for the ranks it was trained on; None: planned for another cluster."""
    measured_bytes: int | None = None
    """Peak of the fullest rank, if it was counted: on an accelerator, or under a declared memory."""
    needed_bytes: int | None = None
    """Bytes that a rank out of memory would have held at that moment; None if none was."""
    limit_bytes: int | None = None
    """Bytes that a rank out of memory may hold; None if none was."""
    predicted_step_seconds: float | None = None
    """Seconds of a step, as planned for the ranks it was trained on; None: planned for another cluster."""
    measured_step_seconds: float | None = None
    """Median seconds of a step, of a training that ended well."""
    seconds: float | None = None
    """Wall clock of the attempt."""
    evaluations: int | None = None
    """Number of evaluations after which the stopping rule ended it; None if nothing did."""
    error: str | None = None
    replaced: str | None = None
    """What became of processes that were killed and started anew while the others went on, in words: a part for
    each, with semicolons between; None if there were none."""
    slow_rank: str | None = None
    """Which ranks were much slower than the others, where, since when, and what came of it, in words: a part for
    each, with semicolons between; None if none was."""

    @property
    def was_moved(self) -> bool:
        """Whether the attempt was ended to go on elsewhere, because a rank was slow."""
        return self.outcome is Outcome.INTERRUPTED and (self.error or "").endswith(MOVED)

    @property
    def lost_its_driver(self) -> bool:
        """Whether the attempt was cut short by the death of its driver, and another driver went on."""
        return self.outcome is Outcome.INTERRUPTED and (self.error or "").startswith(DRIVER_DIED)

    @property
    def unsized_strategy(self) -> str:
        """The strategy without the size of a cache, by which attempts are counted."""
        return named(self.strategy).unsized_name


class StudyTrial(Value):
    """A trial of another study."""

    study: str
    """Name of that study."""
    directory: str
    """Run directory of that study."""
    trial: int
    """Number of the trial there."""


class Proposal(Value):
    """A line of `proposals=FILE`, or what a proposing function has returned, that a trial was made from."""

    line: int
    """Number of the line, from 1 on."""
    key: str
    """Identity of the line, by which it is not taken twice."""
    by: str | None = None
    """Who proposed it, in the line's own words."""
    why: str | None = None
    """Why it was proposed, in the line's own words."""
    outside: bool = False
    """Whether it lies outside the study's space: it has no point, and the sampler is not told of it."""
    training: dict[str, Any] = Field(default_factory=dict)
    """For a proposal outside the space: its training settings, as far as they are not the study's own."""

    @property
    def by_words(self) -> str:
        """` by NAME` if somebody is named."""
        return f" by {self.by}" if self.by else ""


class Origin(Value):
    """Where a trial comes from: who proposed it, which other trials it was made from, when it began."""

    started_at: str | None = None
    """Time of the start in ISO 8601, UTC."""
    sampler_notes: dict[str, int] = Field(default_factory=dict)
    """What the sampler must find again with its proposal when the study is resumed (NSGA-II: its generation)."""
    tuned_from: int | None = None
    """Number of the candidate whose architecture this one has, with training settings that are tuned again."""
    promoted_from: int | None = None
    """For a training on all rows: number of the trial on a part of them (`training.train_fraction`) whose
    configuration it is; None for every other trial."""
    reused_from: int | None = None
    """Number of the trial of this study whose result this one shares (the same job)."""
    reused_from_study: StudyTrial | None = None
    """The trial of another study whose result stands here; nothing was trained."""
    trained_for_weights: bool = omitted(False)
    """Says whether it had a result and won, and is trained here after all, since its weights were gone."""
    members: tuple[int, ...] = ()
    """For an average: numbers of the trials whose predictions it is the mean of."""
    retrained_members: tuple[int, ...] = ()
    """For an average: numbers of the retrainings whose predictions it also is the mean of."""
    distilled_from: int | None = omitted(None)
    """For a network that learnt from an average: number of the candidate whose network it is."""
    teacher: int | None = omitted(None)
    """For a network that learnt from an average: number of that average."""
    of: int | None = None
    """For a retraining: number of the trial whose network, or whose network in part, it is."""
    removed: str | None = None
    """For a retraining of an ablation: what was taken out of the network (`layer 1`, `layer 0: attention`)."""
    proposal: Proposal | None = omitted(None)
    """For a candidate that a person or a program proposed: what was proposed, by whom and why."""


class TrialRecord(Value):
    """All that is known of one trial."""

    number: int
    """0, 1, 2 ... in the order of starting, baseline trials included; retrainings are numbered apart."""
    kind: TrialKind
    point: dict[str, Any] = Field(default_factory=dict)
    """The sampled values, by axis name."""
    origin: Origin = Origin()
    """Where the trial comes from."""
    job: JobSummary = JobSummary()
    """What is trained."""
    plan: TrialPlan = TrialPlan()
    """How it is to be trained."""
    result: Result = Result()
    """What came of it."""
    attempts: tuple[Attempt, ...] = ()
    """Executions so far, in order; several if one ran out of memory. Empty for a shared result."""

    @property
    def first_plan(self) -> PlanSummary | None:
        """The plan as it was made first, before any attempt ran out of memory."""
        return self.attempts[0].plan if self.attempts and self.attempts[0].plan else self.plan.summary

    def with_result(self, **changes: Any) -> TrialRecord:
        """Returns the same trial with some fields of its result changed (see `Value.replace`)."""
        return self.replace(result=self.result.replace(**changes))

    def with_result_of(self, finished: TrialRecord, **origin: Any) -> TrialRecord:
        """Returns the same trial with the result of another one that has done an equal job; `origin` says whose
        result it is."""
        return self.with_origin(**origin).replace(result=finished.result.taken_over())

    def with_job(self, **changes: Any) -> TrialRecord:
        """Returns the same trial with some fields of its job changed."""
        return self.replace(job=self.job.replace(**changes))

    def with_plan(self, **changes: Any) -> TrialRecord:
        """Returns the same trial with some fields of its plan changed."""
        return self.replace(plan=self.plan.replace(**changes))

    def with_origin(self, **changes: Any) -> TrialRecord:
        """Returns the same trial with some fields of its origin changed."""
        return self.replace(origin=self.origin.replace(**changes))

    @property
    def outside_space(self) -> bool:
        """Whether the trial is a proposal outside the study's space, which has no point."""
        return self.origin.proposal is not None and self.origin.proposal.outside

    @property
    def shared(self) -> bool:
        """Whether nothing was trained for this trial: its result is that of another one, here or in another
        study."""
        return self.origin.reused_from is not None or self.origin.reused_from_study is not None

    @property
    def network_of(self) -> int:
        """Number of the trial whose network this is: for a retraining, the trial that is trained once more."""
        return self.number if self.origin.of is None else self.origin.of

    @property
    def owner(self) -> int:
        """Number of the trial in this study whose training, or whose copied weights, this result comes from."""
        return self.number if self.origin.reused_from is None else self.origin.reused_from
