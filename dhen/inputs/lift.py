"""The tables that a model holds of a log's, and how their embeddings come to one length: shares, nodes, lifts.

A shorter embedding is lifted to the common length: e_BD = e_Bd W_t, a linear map for each table (arXiv
1909.11810). Lifts are dense parameters, without a bias. Fresh maps keep the variance of what they lift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.config import ModelConfig
from dhen.cost import CostRow, Costs, elementwise_cost, linear_cost
from dhen.schema import FeatureSchema, Table, node_names
from dhen.tape import FP32_BYTES, Tape

# Interpolated buckets: piecewise-linear functions of a number in place of step functions.
#
# The embedding of a bucket stands for the bucket's beginning, a node, and a number between two nodes has the
# embedding between theirs: e = (1 - u) e_i + u e_(i+1). That is piecewise-linear encoding followed by a linear map
# (Gorishniy et al., arXiv 2203.05556, section 3.2), found with two lookups in place of a product with all buckets.
# Below the second node and beyond the last, e is constant: those buckets have one end each.
#
# Of two neighbouring nodes one is even and one is odd. Therefore even and odd nodes lie in tables of their own, in
# each of which an example has one id, so holding, sharding and pricing tables stay as they are.
#
# Shapes: B examples, C columns of ids in a batch, T categorical tables, N numbers with buckets, D dimension.


class NodeTable(Table):
    """The even or the odd nodes of a number; the first rows are those of ids that stand for no bucket."""

    odd: bool
    """Which of them."""


def node_tables(schema: FeatureSchema) -> int:
    """Returns N, the number of tables of odd nodes, of which there are as many as of even ones."""
    return sum(isinstance(table, NodeTable) and table.odd for table in schema.tables)


@lru_cache(maxsize=8)
def with_nodes(schema: FeatureSchema) -> FeatureSchema:
    """Returns inputs in which tables of even nodes, then of odd ones, have the place of those of buckets."""
    plain = [table for table in schema.categorical if not table.buckets]
    nodes = [
        NodeTable(
            name=node_names(table.name)[odd], rows=(table.rows - odd) // 2 + 1, buckets=True, odd=bool(odd)
        )
        for odd in (0, 1)
        for table in schema.bucketed
    ]
    return schema.replace(tables=(*plain, *nodes, *schema.multi_hot))


class CategoricalIds(nn.Module):
    """A batch's ids as those of some categorical tables, in order: (B, C) -> (B, T)."""

    columns: Tensor | None
    even: Tensor | None
    halvings: Tensor | None

    def __init__(self, schema: FeatureSchema, places: Sequence[int]) -> None:
        """`places` of the tables in a schema, as the model holds it."""
        super().__init__()
        nodes = node_tables(schema)
        columns_held = len(schema.categorical) - nodes
        columns = [place if place < columns_held else place - nodes for place in places]
        self.read = tuple(columns)
        """Columns of a batch that the tables' ids are read from; even and odd nodes share one."""
        tables = [schema.tables[place] for place in places]
        halved = [isinstance(table, NodeTable) for table in tables]
        even = [isinstance(table, NodeTable) and not table.odd for table in tables]
        chosen = columns != list(range(columns_held))
        for name, values, kept in (
            ("columns", columns, chosen),
            ("even", even, any(halved)),
            ("halvings", halved, any(halved)),
        ):
            tensor = torch.tensor([int(value) for value in values], dtype=torch.int64) if kept else None
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, ids_BC: Tensor) -> Tensor:
        """Returns ids_BT. Bucket i lies between the nodes i and i + 1: number (i + 1) // 2 of the even ones and
        number i // 2 of the odd ones. Ids of buckets begin at 2, which moves both by one."""
        ids_BT = ids_BC if self.columns is None else ids_BC.index_select(1, self.columns)
        if self.even is None or self.halvings is None:
            return ids_BT
        return (ids_BT + self.even) >> self.halvings


def interpolate(even_BND: Tensor, odd_BND: Tensor, share_BN: Tensor) -> Tensor:
    """Returns e_BND, the point between each number's two nodes; `share_BN` is how much of it is the odd one's."""
    return torch.lerp(even_BND, odd_BND, share_BN.unsqueeze(2))


def interpolation_cost(numbers: int, dim: int) -> CostRow:
    """The cost of `interpolate`: a difference, a product and a sum for each value."""
    return elementwise_cost("numeric.interpolation", numbers * dim, flops_each=3)


def interpolation_tape(tape: Tape, even: int, odd: int, numbers: int) -> int:
    """The memory of `interpolate`, with the shares' cast."""
    casts = tape.itemsize != FP32_BYTES
    share = tape.scratch(numbers) if casts else tape.beside(numbers)
    return tape.operation(tape.values(even), [even, odd], saves=[share])


# The tables that a model holds of a log's: nodes in place of buckets, a share of what tables may grow to.


class ShareTable(Table):
    """A growing table with a share of the capacity that it has in the log's schema."""


def held_schema(config: ModelConfig, schema: FeatureSchema) -> FeatureSchema:
    """Returns a log's inputs with the tables that a model holds: if it interpolates, those of even nodes, then
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
    """All tables by length, the longest first; there is one group if all have D."""
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
    """The same as interactions see it: of the first tensor the last tables are left out if they are summed, and
    are a tensor of their own, with each number's even nodes for both, if they are interpolated."""
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
        if places:  # else all tables of this length are summed into the numeric embedding
            columns += tape.unbind(e, len(places))
    x = tape.concat([*(columns[place] for place in _order(groups)), *numeric])
    tape.refer(*embeddings, *wholes, *numeric)
    return x


def _order(groups: Sequence[TableGroup]) -> list[int]:
    """For each table of the schema, its place among what is looked up."""
    places = [place for group in groups for place in group.places]
    return sorted(range(len(places)), key=places.__getitem__)
