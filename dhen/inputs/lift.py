"""Shorter embeddings lifted to the common length: e_BD = e_Bd W_t, a linear map for each table (arXiv
1909.11810).

Dense parameters, without a bias. Fresh maps keep the variance of what they lift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.config import ModelConfig
from dhen.cost import Costs, linear_cost
from dhen.inputs.nodes import node_tables, with_nodes
from dhen.schema import FeatureSchema, Table
from dhen.tape import Tape

# The tables that a model holds of a log's: nodes in place of buckets, a share of what tables may grow to.


class ShareTable(Table):
    """A growing table with a share of the capacity that it has in the log's schema."""


def held_schema(config: ModelConfig, schema: FeatureSchema) -> FeatureSchema:
    """Returns a log's inputs with the tables that a model holds: where it interpolates, those of even nodes, then
    those of odd ones, have the place of the tables of buckets; growing tables have its share of their capacity."""
    if config.buckets == "interpolated" and not node_tables(schema):
        schema = with_nodes(schema)
    if config.capacity_share < 1.0 and not any(isinstance(table, ShareTable) for table in schema.tables):
        schema = _with_capacity(schema, config.capacity_share)
    return schema


@lru_cache(maxsize=8)
def _with_capacity(schema: FeatureSchema, share: float) -> FeatureSchema:
    tables = list(schema.tables)
    for place, table in enumerate(tables):
        if table.growing is not None:
            capacity = max(1, round(share * table.growing.capacity))
            changes = {"rows": capacity + 1, "growing": table.growing.replace(capacity=capacity)}
            tables[place] = ShareTable(**{**dict(table), **changes})
    return schema.replace(tables=tuple(tables))


# The length of each table's embeddings: the larger a table, the shorter (mixed dimensions, arXiv 1909.11810).
#
# The paper's power law: d_t = D (n_t / n_min)^-alpha for a table of n_t rows, where the smallest has n_min and
# keeps D. A row of a large table is seen seldom, and has too few examples for many numbers. As its authors do,
# lengths are rounded to powers of two; none is below `SHORTEST`. Left out is how many ids of a table an example
# has. Tables of buckets keep D: they are as small as one likes.

SHORTEST = 4
"""FBGEMM reads rows as vectors of so many values."""


class TableGroup(NamedTuple):
    """Tables whose embeddings have one length."""

    dim: int
    places: tuple[int, ...]
    """Theirs in the schema, in order."""


def table_dims(config: ModelConfig, schema: FeatureSchema) -> tuple[int, ...]:
    """d of each table that the model holds, at most D."""
    schema = held_schema(config, schema)
    fewest = min((table.rows for table in schema.tables if not table.buckets), default=1)
    longest, dims = config.embedding_dim, list[int]()
    for table in schema.tables:
        halvings = 0 if table.buckets else round(config.table_dim_exponent * math.log2(table.rows / fewest))
        if halvings < 1:
            dims.append(longest)
        else:  # a power of two
            power_of_two = 1 << max((longest >> halvings).bit_length() - 1, 0)
            dims.append(min(longest, max(SHORTEST, power_of_two)))
    return tuple(dims)


def summed_tables(config: ModelConfig, schema: FeatureSchema) -> int:
    """Tables of buckets whose embeddings are summed into that of the numeric inputs."""
    return len(schema.bucketed) if config.buckets == "summed" else 0


def num_embeddings(config: ModelConfig, schema: FeatureSchema) -> int:
    """M of x_BMD: one embedding per table of the log that is not summed, and one for all numeric inputs."""
    schema = held_schema(config, schema)
    return len(schema.tables) - summed_tables(config, schema) - node_tables(schema) + bool(schema.numeric)


def table_groups(config: ModelConfig, schema: FeatureSchema) -> tuple[TableGroup, ...]:
    """All tables by length, the longest first; there is one group where all have D."""
    dims = table_dims(config, schema)
    return tuple(
        TableGroup(dim, tuple(place for place, each in enumerate(dims) if each == dim))
        for dim in sorted(set(dims), reverse=True)
    )


def looked_up(config: ModelConfig, schema: FeatureSchema) -> tuple[TableGroup, ...]:
    """What is looked up as one tensor each, in order: a group's categorical tables, then each multi-hot one."""
    found, schema = [], held_schema(config, schema)
    for dim, places in table_groups(config, schema):
        categorical = tuple(place for place in places if not schema.tables[place].multi_hot)
        bags = [(place,) for place in places if schema.tables[place].multi_hot]
        found += [TableGroup(dim, each) for each in (categorical, *bags) if each]
    return tuple(found)


def crossed(config: ModelConfig, schema: FeatureSchema) -> tuple[TableGroup, ...]:
    """The same as interactions see it: of the first tensor the last tables are left out where they are summed, and
    are a tensor of their own, with each number's even nodes for both, where they are interpolated."""
    first, *others = looked_up(config, schema)
    nodes = node_tables(held_schema(config, schema))
    kept = len(first.places) - summed_tables(config, schema) - 2 * nodes
    found = [TableGroup(first.dim, first.places[:kept])] if kept or not nodes else []
    if nodes:
        found.append(TableGroup(first.dim, first.places[kept : kept + nodes]))
    return (*found, *others)


class Lift(nn.Module):
    """The maps of T tables that are looked up together: e_BTd -> e_TBD."""

    def __init__(self, tables: int, dim: int, longest: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tables, dim, longest))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, e_BTd: Tensor) -> Tensor:
        """One batched product."""
        return torch.bmm(e_BTd.transpose(0, 1), self.weight)


class MixedEmbeddings(nn.Module):
    """What tables of several lengths put out, [e_BTd, ...], and the numeric embedding become x_BMD."""

    def __init__(self, config: ModelConfig, schema: FeatureSchema) -> None:
        super().__init__()
        longest, groups = config.embedding_dim, crossed(config, schema)
        self._order = _order(groups)
        self.lifts = nn.ModuleList(
            Lift(len(places), dim, longest) if dim < longest else nn.Identity() for dim, places in groups
        )

    def forward(self, looked_up: Sequence[Tensor], numeric_BD: Tensor | None) -> Tensor:
        """In the schema's order."""
        columns: list[Tensor] = []
        for lift, e_BTd in zip(self.lifts, looked_up, strict=True):
            columns += lift(e_BTd).unbind(0) if isinstance(lift, Lift) else e_BTd.unbind(1)
        ordered = [columns[place] for place in self._order]
        return torch.stack(ordered if numeric_BD is None else [*ordered, numeric_BD], dim=1)


def lift_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """A linear map for each shorter table."""
    dims = zip(held_schema(config, schema).tables, table_dims(config, schema), strict=True)
    return tuple(
        linear_cost(f"table.{table.name}.lift", dim, config.embedding_dim, bias=False)
        for table, dim in dims
        if dim < config.embedding_dim
    )


def mixed_tape(
    tape: Tape, embeddings: Sequence[int], numeric: Sequence[int], config: ModelConfig, schema: FeatureSchema
) -> int:
    """The memory of `MixedEmbeddings`; `numeric` has one tensor or none."""
    longest, groups = config.embedding_dim, crossed(config, schema)
    columns, wholes = [], []
    for e, (dim, places) in zip(embeddings, groups, strict=True):
        if dim < longest:
            shape = len(places), dim * longest
            e = tape.operation(len(places) * longest, [e], saves=[e], parameters=[shape])
        wholes.append(e)
        columns += tape.unbind(wholes[-1], len(places))
    x = tape.concat([*(columns[place] for place in _order(groups)), *numeric])
    tape.refer(*embeddings, *wholes, *numeric)
    return x


def _order(groups: Sequence[TableGroup]) -> list[int]:
    """For each table of the schema, its place among what is looked up."""
    places = [place for group in groups for place in group.places]
    return sorted(range(len(places)), key=places.__getitem__)
