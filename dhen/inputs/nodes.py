"""Interpolated buckets: piecewise-linear functions of a number in place of step functions.

The embedding of a bucket stands for the bucket's beginning, a node, and a number between two nodes has the
embedding between theirs: e = (1 - u) e_i + u e_(i+1). That is piecewise-linear encoding followed by a linear map
(Gorishniy et al., arXiv 2203.05556, section 3.2), found with two lookups in place of a product with all buckets.
Below the second node and beyond the last, e is constant: those buckets have one end each.

Of two neighbouring nodes one is even and one is odd. Therefore even and odd nodes lie in tables of their own, in
each of which an example has one id, and whoever holds, shards or prices tables meets nothing new.

Shapes: B examples, C columns of ids in a batch, T categorical tables, N numbers with buckets, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from dhen.cost import CostRow, elementwise_cost
from dhen.schema import FeatureSchema, Table, node_names
from dhen.tape import FP32_BYTES, Tape


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
