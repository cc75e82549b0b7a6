"""Job: what is trained. Equal fingerprints are the same training run, wherever it happens.

How it is trained (ranks, sharding, offload) is a plan's business and not part of it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, field_validator, model_validator

from dhen.config import ModelConfig
from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema
from dhen.values import Value, fingerprint, omitted, without_removed
from trials.records.trial_record import Refit

STEPS_PER_PASS, MIN_BATCH, MAX_BATCH = 640, 256, 4096
"""Steps per pass that the default batch size aims at; the sizes after it are the bounds of that batch size."""
ONE_PASS_ROWS = 150_000
"""Training rows from which one pass is taken if no training finds out (measured on the demo log,
docs/log.md)."""
SCALING_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Exponents with which the ratio of a batch to the reference batch enters the dense learning rate."""
DELAY_AFTER = 40
"""Steps after which updates are delayed, as training is unstable early (arXiv 2101.06840, section 5.2)."""
REMOVED: dict[str, tuple[Any, str]] = {
    "variance_lag": (None, "one-bit Adam looks at the variance twenty times, and every 1,000 steps at least"),
    "variance_ratio": (0.96, "one-bit Adam takes the variance for steady as in its paper, from 0.96 on"),
    "power_sgd_start": (None, "PowerSGD begins after a tenth of all steps"),
    "delayed_update_after": (
        DELAY_AFTER,
        f"the first {DELAY_AFTER} updates are not delayed, as in the paper",
    ),
}
"""Keys that there were once, as in `search.config.REMOVED`."""
FROM_STEPS = ("variance_lag", "power_sgd_start")
"""Removed keys that jobs of before have with a value that was made of their number of steps, as it is now."""
RESOLVED = ("batch_size", "evaluate_every", "patience", "plateau_factor")
"""Keys that have a value in any resolved settings."""
TRAINING_VERSION = 3
"""Version of training, raised whenever a change makes the same job train to another result; part of every
fingerprint."""


Passes = Annotated[int, Field(gt=0)] | Literal["auto"]
"""A number of passes over the training split, or `auto`: as many as help."""


Synchrony = Literal["local", "async", "semi", "sync"]
"""How embedding tables that servers hold are kept up with by the ranks that train; local if ranks hold them."""


class TablesConfig(Value):
    """Whether embedding tables are on servers, and how far a rank may go on without the updates of others."""

    synchrony: Synchrony = "local"
    """Local: the ranks hold the tables. The others have them on servers (`servers=`), from which each rank pulls
    the rows of its examples and to which it pushes their gradients. Sync: the gradients of all ranks are added up
    by row, for one update, before the next step's rows are pulled, which equals local training up to rounding.
    Semi: the dense part is averaged over ranks at each step, and rows may lack the updates of the last
    `staleness` steps (stale synchronous parallel, NIPS 2013, "More Effective Distributed ML"). Async: each rank
    trains on whole batches of its own, against rows and a dense part on the servers that others update meanwhile
    (Downpour SGD, NIPS 2012); which batch a rank takes depends on who is free, so a training does not repeat to
    the bit."""
    staleness: int | None = Field(default=None, ge=0)
    """Largest number of steps whose updates the rows of a batch may lack, under `synchrony=semi`; by default 1,
    which lets the next batch's rows be pulled while this one is computed. 0 waits for all updates."""
    deterministic_delay: bool = False
    """Whether rows always lack the updates of exactly `staleness` steps (of all, if there were fewer since the
    tables were last evaluated or saved), in place of at most so many: a training then repeats to the bit, and is
    slower."""

    @model_validator(mode="after")
    def _staleness_is_of_semi(self) -> Self:
        if self.synchrony == "semi":
            return self
        for name in ("staleness", "deterministic_delay"):
            if (value := getattr(self, name)) not in (None, False):
                why = "bounds it by nothing" if self.synchrony == "async" else "has none that are old"
                raise ValueError(
                    f"{name}={value} says how old rows may be under synchrony=semi, and synchrony="
                    f"{self.synchrony} {why}; give synchrony=semi too, or leave it out"
                )
        return self

    @property
    def on_servers(self) -> bool:
        """Whether servers hold the tables."""
        return self.synchrony != "local"

    @property
    def steps_behind(self) -> int:
        """Largest number of steps whose updates rows may lack; of no meaning for async."""
        return 0 if self.synchrony != "semi" else 1 if self.staleness is None else self.staleness

    @property
    def servers_return(self) -> bool:
        """Whether a server that is killed comes back while ranks go on, without its updates since it was last
        saved: if no step has to have all updates."""
        return self.synchrony == "async" or (self.synchrony == "semi" and not self.deterministic_delay)

    @property
    def pulls_ahead(self) -> bool:
        """Whether the rows of the next batch are pulled while one is computed."""
        return self.steps_behind > 0 and not self.deterministic_delay


LOCAL_TABLES = TablesConfig()
"""Tables that the ranks hold."""


class TrainingConfig(Value):
    """How a model learns: optimizers, batches, passes, when to stop."""

    model_config = ConfigDict(allow_inf_nan=False)

    batch_size: int | None = Field(default=None, gt=0)
    """Examples per step, over all ranks; by default about 1/640 of a pass, a power of two from 256 to
    4096."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Learning rate of AdamW, which trains the dense part."""
    embedding_learning_rate: float = Field(default=0.1, gt=0)
    """Learning rate of row-wise Adagrad, which trains the embedding tables."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay of the dense part."""
    clip_norm: float | None = omitted(None, gt=0)
    """Largest norm of the dense part's gradients: if the Euclidean norm of all of them together, as of one
    vector, is larger, they are multiplied by `clip_norm` / norm (arXiv 1211.5063). By default they stay as they
    are. Embedding tables are left out, of the norm and of the clipping: row-wise Adagrad divides their gradients
    by how large they were."""
    embedding_decay: float = Field(default=0.0, ge=0)
    """L2 regularisation of those table rows that a batch looks up."""
    table_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled decay of whole tables: at every step each row, looked up or not, is multiplied by
    1 - embedding_learning_rate * table_decay. This is exact, although only rows looked up are touched."""
    frequency_decay: float = omitted(0.0, ge=0)
    """L2 regularisation of the embeddings that examples look up, divided by the number of training rows that have
    their id (after arXiv 1706.06978, equation 6): over a pass all embeddings decay alike, in a step rare ones
    most. It keeps rare ids from being learnt by heart, so that further passes help if they did not
    (docs/log.md); 0.1 is a value to begin with."""
    epochs: Passes = "auto"
    """Largest number of passes over the training split. Auto: as many as help, which a study finds out with its
    baseline, and `train` with the model itself (models with id embeddings commonly overfit from the second pass
    on, arXiv 2209.06053, and some logs need ten). If nothing is trained to find out: one over 150,000 rows or
    more, six over fewer."""
    evaluate_every: int | None = Field(default=None, gt=0)
    """Training examples between two evaluations; by default half a pass (a quarter for a single pass)."""
    patience: int | None = Field(default=None, gt=0)
    """Evaluations in a row without a better validation NE after which training ends; by default 2 for a single
    pass, 4 otherwise (two passes: half-way through one, NE is often worse than at its ends, docs/log.md)."""
    plateau_factor: float | None = Field(default=None, gt=0, le=1)
    """Learning rates are multiplied by this after every evaluation without a better validation NE; by default 0.3
    for a single pass, 1 otherwise (NE often rises for a pass before it falls again, docs/log.md)."""
    schedule: Literal["auto", "constant", "linear", "cosine"] = "auto"
    """Learning rates between plateaus: constant, or falling to zero over all passes, linearly or as half a
    cosine (arXiv 1608.03983, equation 5, without restarts). Auto: linear for a single pass, constant
    otherwise (early stopping cuts several passes short)."""
    weight_average: int = omitted(0, ge=0)
    """Number of the latest evaluations whose weights are averaged (arXiv 2209.14981): 0 (none), or 2 or more.
    At each evaluation the mean of their weights is tried too, and the better of the two counts and is kept.
    It keeps as many copies of the weights in the host's memory."""
    order: Literal["shuffled", "log"] = "shuffled"
    """Order of examples: shuffled anew in each pass, or as in the log (as a model in production sees
    them)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which the dense part computes, from fp32 master weights. Auto: bf16 if this machine
    multiplies bf16 matrices faster, else fp32."""
    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Factor of the dense learning rate: none (1), linear (batch_size / reference_batch_size, arXiv
    1706.02677), or sqrt (the square root of that, AdamW's rule, arXiv 2205.10287). Tables keep their rate:
    Adagrad divides by what it has seen, and most ids occur in few batches of any size (arXiv 2204.06240)."""
    reference_batch_size: int = Field(default=1024, gt=0)
    """The batch size that `learning_rate` was chosen for; it is used if `learning_rate_scaling` is not
    none."""
    warmup_examples: int = Field(default=0, ge=0)
    """Training examples over which the dense learning rate rises linearly to its value (arXiv 1706.02677,
    2.2)."""
    warmup_share: float = omitted(0.0, ge=0, le=1)
    """The warm-up of `warmup_examples` as a share of all passes instead, so that one value suits logs of any
    length; give one of the two."""
    optimizer: Literal["adamw", "onebit_adam"] = omitted("adamw")
    """Optimizer of the dense part: AdamW, or one-bit Adam (arXiv 2102.02888), which is AdamW until the variance is
    steady and then sends one bit per number each way in place of gradients. It changes results, also on one rank,
    which compresses as if there were several. It needs `dp` or `zero1`."""
    power_sgd_rank: int = omitted(0, ge=0)
    """Columns of the two narrow matrices as whose product a matrix's gradient is averaged over ranks (PowerSGD,
    arXiv 1905.13727), after a tenth of all steps; 0 averages gradients as they are. It changes results, and needs
    `dp`; one rank averages nothing."""
    optimizer_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which AdamW's two moments of the dense part are stored; bf16 is rounded stochastically."""
    table_precision: Literal["fp32", "fp16"] = "fp32"
    """Precision in which embedding tables are stored. Updates in fp16 are rounded stochastically, except if
    FBGEMM shards tables on a CPU."""
    all_to_all_precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Precision in which pooled embeddings and their gradients are sent between ranks, and rows and their
    gradients between ranks and servers."""
    all_reduce_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which gradients of the dense part are sent between ranks and added up. Auto: that of
    `precision`, which needs no conversion. With fp32 under a `precision` of bf16, twice the bytes are sent
    and sums lose no further digits."""
    delayed_update: bool = omitted(False)
    """Whether the dense part's update goes on while the next step runs, which computes with the weights of the
    update before (ZeRO-Offload's delayed parameter update, arXiv 2101.06840, section 5.2). It changes results.
    Only the strategy `zero_offload` can do it. The first 40 updates are not delayed, as training is unstable
    early. Every 25th step, and every evaluation, waits for the update."""
    tables: TablesConfig = omitted(LOCAL_TABLES)
    """Whether embedding tables are on servers, and how far a rank may go on without the updates of others."""
    train_fraction: float = omitted(1.0, gt=0, le=1)
    """Share of the training rows that is trained on: the last ones in the log's order, which are the latest
    and closest to what is predicted. Vocabularies and statistics stay those of all rows. Defaults of batch
    size, passes and learning rates stay those for all rows, so that a ranking of models carries over; the
    default of `evaluate_every` is the same share of a pass. Values that are given in examples
    (`evaluate_every`, `warmup_examples`) are not scaled."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and all(data.get(key) for key in RESOLVED):
            data = {key: value for key, value in data.items() if key not in FROM_STEPS}
        return without_removed(data, REMOVED)

    def examples(self, train_rows: int) -> int:
        """Returns how many examples all passes have on a log with so many training rows; the settings are
        resolved."""
        assert self.epochs != "auto"
        return self.epochs * self.rows_used(train_rows)

    def rows_used(self, train_rows: int) -> int:
        """Returns how many of so many training rows are trained on: the last ones."""
        return max(1, round(self.train_fraction * train_rows))

    @field_validator("weight_average")
    @classmethod
    def _several(cls, value: int) -> int:
        if value == 1:
            raise ValueError("the mean of one is itself; average two evaluations or more, or 0 for none")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_share and self.warmup_examples:
            raise ValueError(
                f"warmup_examples={self.warmup_examples} and warmup_share={self.warmup_share} say the same "
                f"thing twice; give one of them"
            )
        alone = self.tables.synchrony == "async"
        own_gradients = "compresses what ranks average, and here each pushes its own gradients"
        beside_servers = {
            f"weight_average={self.weight_average}": (
                self.weight_average > 0,
                "keeps copies of whole tables, which one rank would have to hold",
            ),
            f"optimizer={self.optimizer}": (alone and self.optimizer != "adamw", own_gradients),
            f"power_sgd_rank={self.power_sgd_rank}": (alone and self.power_sgd_rank > 0, own_gradients),
            "delayed_update=true": (alone and self.delayed_update, "is of an update on the rank's host"),
        }
        for setting, (given, why) in beside_servers.items():
            if given and self.tables.on_servers:
                raise ValueError(
                    f"{setting} {why}, and under tables.synchrony={self.tables.synchrony} servers hold what is "
                    "updated; leave one of the two out"
                )
        if self.optimizer != "adamw" and self.optimizer_precision != "fp32":
            raise ValueError(
                f"optimizer_precision={self.optimizer_precision} rounds moments, in which "
                f"optimizer=onebit_adam keeps what its compression loses; give optimizer_precision=fp32, or "
                f"optimizer=adamw"
            )
        if self.optimizer != "adamw" and self.delayed_update:
            raise ValueError(
                "delayed_update=true is of zero_offload, which updates by AdamW on the host, and "
                "optimizer=onebit_adam updates on the device; leave one of them out"
            )
        beside_power_sgd = {
            "optimizer=onebit_adam": self.optimizer != "adamw",
            "delayed_update=true": self.delayed_update,
            "all_reduce_precision": self.all_reduce_precision not in ("auto", self.precision),
        }
        for setting, differs in beside_power_sgd.items():
            if differs and self.power_sgd_rank:
                raise ValueError(
                    f"power_sgd_rank={self.power_sgd_rank} says how gradients are sent, and {setting} does too; "
                    "leave one of them out"
                )
        return self

    def resolved(self, train_rows: int, precision: Literal["fp32", "bf16"]) -> TrainingConfig:
        """Returns the same settings with nothing left open, for a log of this size on a machine that prefers this
        precision.

        `train_rows` are all that the log has, `train_fraction` of which are used.

        Raises:
            UserError: for a warm-up that is longer than all passes.
        """
        steps = train_rows / STEPS_PER_PASS
        power = 2 ** round(math.log2(min(max(steps, MIN_BATCH), MAX_BATCH)))
        epochs = (1 if train_rows >= ONE_PASS_ROWS else 6) if self.epochs == "auto" else self.epochs
        used = self.rows_used(train_rows)
        evaluate_every = self.evaluate_every or used // (4 if epochs == 1 else 2)
        computed = precision if self.precision == "auto" else self.precision
        if self.warmup_examples > epochs * used:
            raise UserError(
                f"training.warmup_examples={self.warmup_examples} is longer than the training itself: "
                f"training.epochs={epochs} over {used} examples are {epochs * used}; "
                f"give at most that, or more passes."
            )
        return self.replace(
            epochs=epochs,
            batch_size=min(self.batch_size or power, used),
            evaluate_every=max(1, min(evaluate_every, used)),
            patience=self.patience or (2 if epochs == 1 else 4),
            plateau_factor=self.plateau_factor or (0.3 if epochs == 1 else 1.0),
            precision=computed,
            all_reduce_precision=self.reduction_precision(computed),
            schedule=("linear" if epochs == 1 else "constant") if self.schedule == "auto" else self.schedule,
        )

    def reduction_precision(self, computed: Literal["fp32", "bf16"]) -> Literal["fp32", "bf16"]:
        """Returns the precision that gradients are sent and added up in, if they are computed in `computed`."""
        return computed if self.all_reduce_precision == "auto" else self.all_reduce_precision

    @property
    def dense_learning_rate(self) -> float:
        """Learning rate of the dense part, after its warm-up and before plateaus and schedule: scaled to the
        batch."""
        assert self.batch_size is not None or self.learning_rate_scaling == "none"
        times = (self.batch_size or 0) / self.reference_batch_size
        return self.learning_rate * math.pow(times, SCALING_EXPONENTS[self.learning_rate_scaling])


AnyModel = Annotated[
    SerializeAsAny[ModelConfig],
    BeforeValidator(lambda value: parse_model(value, "model") if isinstance(value, dict) else value),
]
"""A model configuration of any family, parsed from plain data."""


class Job(Value):
    """One training run: what is trained, on what, how long, from which seed."""

    model: AnyModel
    features: FeatureSchema
    log: str
    """Fingerprint of the prepared log."""
    training: TrainingConfig
    seed: int = Field(ge=0)
    """Seed of the initial weights, the order of examples and dropout."""
    version: int = TRAINING_VERSION
    origin: int | None = omitted(None, gt=0)
    """Number of the training rows, the first ones, that are trained on as if the log had ended there; the rows
    after them stand for validation (`trials.data.log_views`). None: the whole log."""
    refit: Refit | None = omitted(None)
    """How long training on the rows of training and validation together goes on (`trials.data.log_views`); None:
    validation is no part of what is trained on, and says when training ends."""
    teacher: str | None = omitted(None)
    """Fingerprint of the average that has softened the labels (`trials.data.log_views`); None: the log's own."""
    period: str | None = omitted(None)
    """Length of the periods in which validation and test are gone through, each scored before it is trained on
    (`trials.training.progressive`); None: the trained weights score them as they are."""

    @property
    def evaluate_every(self) -> int:
        """Number of examples from one evaluation to the next, or from one place of them that a refit goes past."""
        every = (self.refit and self.refit.evaluate_every) or self.training.evaluate_every
        assert every is not None, "a job's training is resolved"
        return every

    @property
    def weight_average(self) -> int:
        """Number of the last evaluations whose weights' mean is kept; 0 for the weights alone."""
        return (self.refit and self.refit.weight_average) or self.training.weight_average

    @property
    def fingerprint(self) -> str:
        """The job's identity: 16 hex digits over all its fields but counts of ids, which decide what a training
        costs and not what it comes to."""
        job = self.to_dict()
        for table in job["features"]["tables"]:
            table.pop("repeats", None)
        return fingerprint(job)


def check_order(features: FeatureSchema, training: TrainingConfig) -> None:
    """Checks that the log's time goes forward in a training whose tables go by it.

    Raises:
        UserError: if examples are shuffled, and ids give their rows back after a time without an occurrence.
    """
    if features.timed and training.order == "shuffled":
        timed = next(table for table in features.growing if table.growing and table.growing.ttl_milliseconds)
        assert timed.growing is not None
        raise UserError(
            f"the ttl of {timed.name}, {timed.growing.ttl}, is of the log's time, which does not go forward if "
            "examples are shuffled: give training.order=log too, or the ttl as a number of training steps."
        )
