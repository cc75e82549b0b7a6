"""The rows of the DHEN paper's tables 1, 2 and 3 (arXiv 2203.11014) as models, its values, and what it finds.

The paper's values were read from a secondary source. Its AdvancedDLRM and its log are not public,
the modules of its DHENs in tables 2 and 3 not known to us: ours are as `dhen.ops.pairwise` and the settings say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dhen.config import ModelConfig
from dhen.cost import headline_flops
from dhen.model import model_cost, parse_model
from dhen.schema import FeatureSchema
from search.analysis.reproduce.config import Table1Config, Table2Config, Table3Config, TableConfig

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


class Table(NamedTuple):
    """The rows that are trained, and the claims that they are to decide."""

    title: str
    rows: tuple[Row, ...]
    """Rows of the table; NE is relative to the first."""
    claims: tuple[Claim, ...]


def table_of(config: TableConfig, schema: FeatureSchema) -> Table:
    """The table that the settings are for.

    Raises:
        UserError: where they give no valid model.
    """
    table = _by_number(config, schema)
    return table._replace(title=f"{table.title}; pre-norm") if config.norm_placement == "pre" else table


def _by_number(config: TableConfig, schema: FeatureSchema) -> Table:
    if isinstance(config, Table1Config):
        return table1(config)
    if isinstance(config, Table3Config):
        return table3(config, schema)
    assert isinstance(config, Table2Config), config
    return table2(config)


def table1(config: Table1Config) -> Table:
    """Single modules and pairs in stacks of N layers, against DCN."""
    paper = PAPER_1 if config.layers == PAPER_LAYERS_1 else {}
    names = ("DCN", *PAPER_1)
    modules = {name: [MODULES_1[module] for module in name.split("+")] for name in names}
    rows = tuple(Row(name, _dhen(config, modules[name], config.layers), paper.get(name)) for name in names)
    best, others = "attention+linear", ("attention+convolution", "DCN+linear")
    return Table(
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


def table2(config: Table2Config) -> Table:
    """AdvancedDLRM, its module stacked, and DHENs of the same depths."""
    stacked = {n: f"AdvancedDLRM stacked, {_counted(n, 'layer')}" for n in config.layers}
    dhens = {n: _dhen_name(config, n) for n in config.layers}
    rows = [Row("AdvancedDLRM", _advanced_dlrm(config, 1))]
    rows += [Row(stacked[n], _dhen(config, [_module("dlrm", config.mlp)], n)) for n in config.layers]
    rows += [Row(dhens[n], _mixed(config, n, config.mlp), PAPER_2.get(n)) for n in config.layers]
    return Table(
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


def table3(config: Table3Config, schema: FeatureSchema) -> Table:
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
    return Table(
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
    """The claim that each row is better than the one before; none where there is but one row."""
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
