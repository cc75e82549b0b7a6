"""The rows of the DHEN paper's tables 1, 2 and 3 (arXiv 2203.11014) as models, its values, and what it finds.

The paper's values were read from a secondary source. Its AdvancedDLRM and its log are not public, the modules
of its DHENs in tables 2 and 3 not known to us: ours are as `dhen.ops.pairwise` and the settings say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dhen.config import ModelConfig
from dhen.cost import headline_flops
from dhen.errors import unknown_name
from dhen.model import model_cost, parse_model
from dhen.ops.parts import Widths
from dhen.schema import FeatureSchema
from dhen.values import parse
from search.analysis.statistics import CONFIDENCE
from search.log_config import LogConfig, set_override
from trials.records.job import Passes, TrainingConfig

# What `reproduce` may be told: the log, the seeds, and what all rows of a table have in common.


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
    """Confidence of the t-intervals over seeds; 0.95 if not given."""
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


PAPER_LAYERS_1 = 5
PAPER_1 = {
    "attention": -1.044,
    "convolution": -1.534,
    "linear": -1.538,
    "DCN+linear": -0.004,
    "attention+linear": -1.576,
    "attention+convolution": -1.508,
}
"""Table 1: NE against DCN in percent, at its last milestone."""
PAPER_2 = {2: -0.176, 4: -0.255, 8: -0.273}
"""Table 2: NE against AdvancedDLRM in percent, by layers, at 25 billion examples."""
PAPER_3_EXPERTS = {4: (1.3e9, -0.06), 8: (3.3e9, -0.09), 16: (6e9, -0.10)}
PAPER_3_LAYERS = {2: (1.44e9, -0.11), 4: (3e9, -0.21), 6: (4.6e9, -0.26)}
"""Table 3: FLOPs, and NE in percent."""
UNKNOWN = (None, None)
MODULES_1: dict[str, dict[str, Any]] = {
    "DCN": {"kind": "dcn"},
    "attention": {"kind": "attention"},
    "convolution": {"kind": "conv", "channels": 1, "activation": "none"},
    "linear": {"kind": "linear"},
}
"""Interaction modules by the paper's names, in its forms."""
WIDEST = 16_384
"""Largest last width of an MLP that is widened."""


class Row(NamedTuple):
    """One model of a table."""

    name: str
    model: ModelConfig
    paper_percent: float | None = None
    paper_flops: float | None = None


class Claim(NamedTuple):
    """A claim about rows: in each pair the first has the lower NE."""

    text: str
    pairs: tuple[tuple[str, str], ...]
    """Names of rows."""
    in_paper: bool = True
    """Whether the paper makes the claim; False for what others ask about the paper."""


class PaperTable(NamedTuple):
    """The rows that are trained, and the claims that they are to decide."""

    title: str
    rows: tuple[Row, ...]
    """Rows of the table; NE is relative to the first."""
    claims: tuple[Claim, ...]


def table_of(config: TableConfig, schema: FeatureSchema) -> PaperTable:
    """The table that the settings are for.

    Raises:
        UserError: if they give no valid model.
    """
    if isinstance(config, Table1Config):
        table = table1(config)
    elif isinstance(config, Table3Config):
        table = table3(config, schema)
    else:
        assert isinstance(config, Table2Config), config
        table = table2(config)
    return table._replace(title=f"{table.title}; pre-norm") if config.norm_placement == "pre" else table


def table1(config: Table1Config) -> PaperTable:
    """Single modules and pairs in stacks of N layers, against DCN."""
    paper = PAPER_1 if config.layers == PAPER_LAYERS_1 else {}
    names = ("DCN", *PAPER_1)
    modules = {name: [MODULES_1[module] for module in name.split("+")] for name in names}
    rows = tuple(Row(name, _dhen(config, modules[name], config.layers), paper.get(name)) for name in names)
    best, others = "attention+linear", ("attention+convolution", "DCN+linear")
    return PaperTable(
        f"single modules and pairs of them, {_counted(config.layers, 'layer')}, against DCN",
        rows,
        (
            *(Claim(f"{name} is better than DCN", ((name, "DCN"),)) for name in names[1:4]),
            Claim("linear is better than attention", (("linear", "attention"),)),
            Claim(f"{best} is the best of the pairs", tuple((best, other) for other in others)),
            Claim(f"{best} is better than either alone", tuple((best, module) for module in best.split("+"))),
            Claim("linear loses by being paired with DCN", (("linear", "DCN+linear"),)),
        ),
    )


def table2(config: Table2Config) -> PaperTable:
    """AdvancedDLRM, its module stacked, and DHENs of the same depths."""
    stacked = {n: f"AdvancedDLRM stacked, {_counted(n, 'layer')}" for n in config.layers}
    dhens = {n: _dhen_name(config, n) for n in config.layers}
    rows = [Row("AdvancedDLRM", _advanced_dlrm(config, 1))]
    rows += [Row(stacked[n], _dhen(config, [_module("dlrm", config.mlp)], n)) for n in config.layers]
    rows += [Row(dhens[n], _mixed(config, n, config.mlp), PAPER_2.get(n)) for n in config.layers]
    return PaperTable(
        "AdvancedDLRM, alone and stacked, against DHEN",
        tuple(rows),
        (
            *(
                Claim(f"{name} is better than AdvancedDLRM", ((name, "AdvancedDLRM"),))
                for name in dhens.values()
            ),
            *_more_is_better("more layers of DHEN are better", list(dhens.values())),
            *(
                Claim(
                    f"depth or design: {dhens[n]} is better than AdvancedDLRM stacked as deep",
                    ((dhens[n], stacked[n]),),
                    in_paper=False,
                )
                for n in config.layers
            ),
            *(
                Claim(f"depth alone: {name} is better than AdvancedDLRM", ((name, "AdvancedDLRM"),), False)
                for name in stacked.values()
            ),
        ),
    )


def table3(config: Table3Config, schema: FeatureSchema) -> PaperTable:
    """AdvancedDLRM with a mixture of experts against DHENs whose FLOPs are made the same."""
    rows, moes, dhens = [Row("AdvancedDLRM", _advanced_dlrm(config, 1))], [], []
    for experts, layers in zip(config.experts, config.layers, strict=True):
        moe = _advanced_dlrm(config, experts)
        dhen = _like(config, layers, headline_flops(model_cost(moe, schema)), schema)
        moes.append(_row(f"MoE, {_counted(experts, 'expert')}", moe, PAPER_3_EXPERTS.get(experts, UNKNOWN)))
        dhens.append(_row(_dhen_name(config, layers), dhen, PAPER_3_LAYERS.get(layers, UNKNOWN)))
    rows += [*moes, *dhens]
    alike = [
        Claim(f"{dhen.name} is better than {moe.name}, at like FLOPs", ((dhen.name, moe.name),))
        for moe, dhen in zip(moes, dhens, strict=True)
    ]
    least = Claim(
        f"{dhens[0].name} is better than {moes[-1].name}, for less", ((dhens[0].name, moes[-1].name),)
    )
    return PaperTable(
        "mixtures of experts against stacked layers at like FLOPs, both against AdvancedDLRM",
        tuple(rows),
        (
            *alike,
            *([least] if len(moes) > 1 else []),
            *_more_is_better("more experts are better", [row.name for row in moes]),
            *_more_is_better("more layers of DHEN are better", [row.name for row in dhens]),
        ),
    )


def _row(name: str, model: ModelConfig, paper: tuple[float | None, float | None]) -> Row:
    return Row(name, model, paper_percent=paper[1], paper_flops=paper[0])


def _more_is_better(text: str, ascending: Sequence[str]) -> list[Claim]:
    """The claim that each row is better than the one before; none if there is but one row."""
    pairs = tuple((more, less) for less, more in pairwise(ascending))
    return [Claim(text, pairs)] if pairs else []


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n > 1)


def _dhen_name(config: Table2Config, n: int) -> str:
    return f"DHEN {'+'.join(config.modules)}, {_counted(n, 'layer')}"


def _module(kind: str, mlp: Sequence[int]) -> dict[str, Any]:
    return {"kind": kind, "mlp": list(mlp)} if kind == "dlrm" else {"kind": kind}


def _mixed(config: Table2Config, layers: int, mlp: Sequence[int]) -> ModelConfig:
    return _dhen(config, [_module(kind, mlp) for kind in config.modules], layers)


def _dhen(config: TableConfig, modules: list[dict[str, Any]], layers: int) -> ModelConfig:
    layer = {
        "modules": modules,
        "ensemble": config.ensemble,
        "out_embeddings": config.out_embeddings,
        "norm_placement": config.norm_placement,
    }
    data = {"embedding_dim": config.embedding_dim, "layers": [layer] * layers, "head": config.head}
    return parse_model(data, "a row of the table")


def _advanced_dlrm(config: Table2Config, experts: int) -> ModelConfig:
    data = {"embedding_dim": config.embedding_dim, "mlp": config.mlp, "experts": experts}
    return parse_model({"family": "advanced_dlrm", **data}, "a row of the table")


def _like(config: Table3Config, layers: int, flops: float, schema: FeatureSchema) -> ModelConfig:
    """The DHEN whose FLOPs are nearest to `flops`, by the width of its AdvancedDLRM modules' MLP."""

    def model(width: int) -> ModelConfig:
        scaled = [max(1, round(width * layer_width / config.mlp[-1])) for layer_width in config.mlp]
        return _mixed(config, layers, scaled)

    def cost(width: int) -> float:
        return headline_flops(model_cost(model(width), schema))

    above = 1 + bisect_left(range(1, WIDEST), flops, key=cost)
    return model(min((max(1, above - 1), above), key=lambda width: abs(cost(width) - flops)))
