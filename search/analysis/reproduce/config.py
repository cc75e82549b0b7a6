"""What `reproduce` may be told: the log, the seeds, and what all rows of a table have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dhen.errors import unknown_name
from dhen.ops.parts import Widths
from dhen.values import parse
from search.log_config import LogConfig, set_override
from trials.job import Passes, TrainingConfig

CONFIDENCE = 0.95
"""Confidence of intervals, where nothing else is asked for."""


def _several(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(value.split(","))
    return (value,) if isinstance(value, int) else value


def _different(counts: tuple[int, ...]) -> tuple[int, ...]:
    doubled = next((count for count in counts if counts.count(count) > 1), None)
    if doubled is not None:
        raise ValueError(f"{doubled} is given twice; each makes a row of its own, so give it once")
    return counts


def _names(value: Any) -> Any:
    return tuple(value.split("+")) if isinstance(value, str) else value


Count = Annotated[int, Field(gt=0, le=1000)]
Counts = Annotated[
    tuple[Count, ...], BeforeValidator(_several), Field(min_length=1), AfterValidator(_different)
]
"""Numbers above 0, each once; a single one needs no list."""
Modules = Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1)]
"""Kinds of interaction modules, e.g. `dlrm+linear` or a list."""


class SinglePass(TrainingConfig):
    """Each row trains for one pass over the log, as in the paper, and to its end: no training stops early or
    lowers its learning rate at a plateau, so that NE is compared at the same examples and learning rates.
    Learning rates warm up: without that, deep rows may end up predicting a constant (docs/log.md)."""

    epochs: Passes = 1
    """Largest number of passes over the training split; one, as in the paper."""
    patience: int | None = Field(default=1_000_000, gt=0)
    """Evaluations in a row without a better validation NE after which training ends; by default it never
    does."""
    plateau_factor: float | None = Field(default=1.0, gt=0, le=1)
    """Learning rates are multiplied by this after every evaluation without a better validation NE; 1 leaves
    them."""
    warmup_share: float = Field(default=0.1, ge=0, le=1)
    """Share of all passes over which the dense learning rate rises linearly to its value."""

    @model_validator(mode="before")
    @classmethod
    def _examples_in_place_of_a_share(cls, data: Any) -> Any:
        return (
            {"warmup_share": 0.0, **data} if isinstance(data, dict) and data.get("warmup_examples") else data
        )


class TableConfig(LogConfig):
    """Settings that the three tables share; all rows of a table are trained alike."""

    seeds: int = Field(default=3, gt=0, le=1000)
    """Number of trainings of each row, with seeds `seed`, `seed + 1`, ...; one gives no intervals."""
    seed: int = Field(default=0, ge=0)
    """The first seed, of the initial weights and the order of examples; the same for every row."""
    confidence: float | None = Field(default=None, gt=0, lt=1)
    """Confidence of the t-intervals over seeds; 0.95 where not given."""
    milestones: int = Field(default=5, gt=0, le=1000)
    """Number of evaluations on validation in a training, evenly spaced, the last at its end."""
    embedding_dim: int = Field(default=16, gt=0)
    """D, the length of every embedding, in every row of the table."""
    out_embeddings: int = Field(default=8, gt=0)
    """l, the number of embeddings that each interaction module puts out."""
    ensemble: str = "sum"
    """How a layer joins its modules."""
    norm_placement: Literal["post", "pre"] = "post"
    """Place of a layer's norm: post, on its output, as in the paper, or pre, on what its modules see."""
    head: Widths = (64,)
    """Hidden widths of the MLP from a DHEN's last layer to the logit."""
    training: SinglePass = SinglePass()
    """Training settings of every row."""
    parallel: int | None = Field(default=None, gt=0)
    """Number of trainings side by side; the default is that of a study."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per training; the default is that of a study."""

    @model_validator(mode="after")
    def _intervals_need_seeds(self) -> TableConfig:
        if self.confidence is not None and self.seeds < 2:
            raise ValueError(
                f"an interval (confidence={self.confidence}) needs seeds=2 or more, received {self.seeds}. "
                "Without confidence= one seed gives a table without intervals"
            )
        return self

    @property
    def level(self) -> float:
        """Confidence of the intervals."""
        return self.confidence or CONFIDENCE


class Table1Config(TableConfig):
    """Single modules and pairs of them."""

    layers: Count = 5
    """N, the number of layers of every row."""


class Table2Config(TableConfig):
    """AdvancedDLRM against DHEN."""

    layers: Counts = (2, 4, 8)
    """N, the number of layers, of each DHEN; each makes a row."""
    modules: Modules = ("dlrm", "linear")
    """Interaction modules in each layer of a DHEN; those behind the paper's table are not known to us."""
    mlp: Widths = Field(default=(256, 128), min_length=1)
    """Hidden widths of AdvancedDLRM's MLP, as a model and as an interaction module (`dlrm`)."""


class Table3Config(Table2Config):
    """AdvancedDLRM with a mixture of experts against DHEN at similar FLOPs."""

    layers: Counts = (2, 4, 6)
    """N, the number of layers, of each DHEN; each makes a row."""
    experts: Counts = (4, 8, 16)
    """Number of experts of each mixture: the first is compared with the first DHEN, and so on."""

    @model_validator(mode="after")
    def _are_pairs(self) -> Table3Config:
        if len(self.layers) != len(self.experts):
            raise ValueError(
                f"layers={list(self.layers)} and experts={list(self.experts)} are compared one with one, at "
                "like FLOPs: give as many of the one as of the other"
            )
        if "dlrm" not in self.modules:
            raise ValueError(
                "FLOPs are made alike by the MLP of the module dlrm: it must be one of modules="
                f"{'+'.join(self.modules)}"
            )
        return self


CONFIGS: dict[str, type[TableConfig]] = {
    "table1": Table1Config,
    "table2": Table2Config,
    "table3": Table3Config,
}


def read_table_config(table: str, overrides: Iterable[str], data: tuple[str, ...]) -> TableConfig:
    """The table's settings from `key=value` words.

    Raises:
        UserError: for an unknown table or key (the nearest is named), and for wrong values.
    """
    if table not in CONFIGS:
        raise unknown_name("table", table, CONFIGS)
    settings: dict[str, Any] = {"data": data}
    for word in overrides:
        set_override(settings, word)
    return parse(CONFIGS[table], settings, table)
