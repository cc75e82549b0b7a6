"""The length of each table's embeddings: the larger a table, the shorter (mixed dimensions, arXiv 1909.11810).

The paper's power law: d_t = D (n_t / n_min)^-alpha for a table of n_t rows, where the smallest has n_min and keeps
D. A row of a large table is seen seldom, and has too few examples for many numbers. As its authors do, lengths are
rounded to powers of two; none is below `SHORTEST`. Left out is how many ids of a table an example has. Tables of
buckets keep D: they are as small as one likes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dhen.config import ModelConfig
from dhen.inputs.held_schema import held_schema
from dhen.inputs.nodes import node_tables
from dhen.schema import FeatureSchema

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
    halvings = [
        0.0 if table.buckets else config.table_dim_exponent * math.log2(table.rows / fewest)
        for table in schema.tables
    ]
    return tuple(_shortened(config.embedding_dim, round(each)) for each in halvings)


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


def _shortened(longest: int, halvings: int) -> int:
    """A power of two within the bounds, or all where there is nothing to halve."""
    if halvings < 1:
        return longest
    power_of_two = 1 << max((longest >> halvings).bit_length() - 1, 0)
    return min(longest, max(SHORTEST, power_of_two))
