"""Feature processing: sparse ids and raw numbers become the embeddings x_BMD (paper, section 3.1).

One embedding per table (multi-hot bags are averaged) and one for all numeric inputs, by an MLP, to which those of
their buckets are added unless the configuration has them apart, or interpolated (`dhen.inputs.lift`). Tables of
one dimension lie in one matrix, so all their categorical columns are looked up at once; its gradient is sparse.
What a table's first row is belongs to `row_offsets`; sharding is not decided here.

Shapes: B examples, T categorical tables, N columns of buckets that are summed or interpolated, K numeric inputs,
M embeddings out, D their dimension, R rows of a matrix.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import ELEMENTWISE, LOOKUP, CostRow, Costs, elementwise_cost, headline_flops
from dhen.inputs.growing import GrowingRows, fresh_rows
from dhen.inputs.lift import (
    CategoricalIds,
    MixedEmbeddings,
    held_schema,
    interpolate,
    interpolation_cost,
    interpolation_tape,
    lift_cost,
    looked_up,
    mixed_tape,
    node_tables,
    summed_tables,
    table_dims,
    table_groups,
)
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import mlp, mlp_cost, mlp_tape
from dhen.schema import FeatureSchema
from dhen.tape import FP32_BYTES, Tape, TapedSegment, TapeSetting

EMBEDDING_BYTES = 4


class TableLookups(nn.Module):
    """Tables of a schema one after another in one matrix, however its rows are stored."""

    row_offsets: Tensor

    def __init__(self, schema: FeatureSchema, places: Sequence[int] | None = None) -> None:
        """`places` in the schema of those to hold, in order; None for all."""
        super().__init__()
        n, everything = len(schema.categorical), range(len(schema.tables))
        places = everything if places is None else places
        self.schema, self.places = schema, places
        self.tables = tuple(schema.tables[place] for place in places)
        columns = [place for place in places if place < n]
        self.bags = tuple(place - n for place in places if place >= n)
        """Places of the multi-hot tables in a batch."""
        self.starts = (0, *itertools.accumulate(table.rows for table in self.tables))
        """First row of each table, and at the end the number of all."""
        self.bag_offsets = self.starts[len(columns) : -1]
        firsts = torch.tensor(self.starts[: len(columns)], dtype=torch.int64)
        self.register_buffer("row_offsets", firsts, persistent=False)
        self.ids = CategoricalIds(schema, columns)

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        """[e_BTD, e_B1D, ...]: the categorical tables together, then each multi-hot one."""
        looked_up = []
        if self.row_offsets.numel():
            looked_up.append(self.embedded(self._categorical_rows(batch)))
        for rows, offsets_B in self._bag_rows(batch):
            looked_up.append(self.pooled(rows, offsets_B.long()).unsqueeze(1))
        return looked_up

    @abstractmethod
    def embedded(self, rows_BT: Tensor) -> Tensor:
        """Returns e_BTD, the embeddings of rows of the tables."""

    @abstractmethod
    def pooled(self, rows: Tensor, offsets_B: Tensor) -> Tensor:
        """Returns e_BD, the means of the embeddings of bags of rows; none gives zeros."""

    def rows(self, batch: FeatureBatch) -> Tensor:
        """The rows of the tables that a batch reads, in any order, some several times: int64, one dimension."""
        return torch.cat(
            [self._categorical_rows(batch).flatten(), *(rows for rows, _ in self._bag_rows(batch))]
        )

    def _categorical_rows(self, batch: FeatureBatch) -> Tensor:
        rows_BT: Tensor = self.ids(batch.ids_BT) + self.row_offsets
        return rows_BT

    def _bag_rows(self, batch: FeatureBatch) -> list[tuple[Tensor, Tensor]]:
        """Rows and the offsets at which examples start, of each multi-hot table."""
        chosen = [batch.bags[place] for place in self.bags]
        return [
            (ids.long() + start, offsets_B)
            for (ids, offsets_B), start in zip(chosen, self.bag_offsets, strict=True)
        ]


class EmbeddingTables(TableLookups):
    """Tables of a schema as one matrix of (rows of all of them, D), which can be trained."""

    def __init__(self, schema: FeatureSchema, dim: int, places: Sequence[int] | None = None) -> None:
        """`places` in the schema of those to hold, in order; None for all."""
        super().__init__(schema, places)
        self.weight = nn.Parameter(fresh_rows(self.tables, self.starts, dim))
        self.slots: Tensor | None = None
        """Where each row lies in `weight` (int32, in host memory), if that has only some of them; None if it
        has all, in order."""

    def embedded(self, rows_BT: Tensor) -> Tensor:
        """See `TableLookups`; the gradient is sparse."""
        return F.embedding(self._held(rows_BT), self.weight, sparse=True)

    def pooled(self, rows: Tensor, offsets_B: Tensor) -> Tensor:
        """See `TableLookups`; the gradient is sparse."""
        return F.embedding_bag(self._held(rows), self.weight, offsets_B, mode="mean", sparse=True)

    def _held(self, rows: Tensor) -> Tensor:
        """Rows of `weight` in place of rows of the tables."""
        return rows if self.slots is None else self.slots[rows.cpu()].long().to(rows.device)


class MixedTables(nn.ModuleDict):
    """Tables of several lengths: those of length d are the `EmbeddingTables` called `d{d}`."""

    def __init__(self, config: ModelConfig, schema: FeatureSchema) -> None:
        groups, schema = table_groups(config, schema), held_schema(config, schema)
        super().__init__({f"d{dim}": EmbeddingTables(schema, dim, places) for dim, places in groups})

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        """Theirs, one after another (`dhen.inputs.lift.looked_up`)."""
        return [e for tables in self.values() for e in tables(batch)]


Tables = EmbeddingTables | MixedTables


def matrices(tables: Tables) -> dict[str, EmbeddingTables]:
    """The matrices that tables lie in, by the names of their weights."""
    if isinstance(tables, EmbeddingTables):
        return {"weight": tables}
    return {f"{name}.weight": each for name, each in tables.items()}  # type: ignore[misc]


class FeatureProcessing(nn.Module):
    """FeatureBatch -> x_BMD."""

    def __init__(self, config: ModelConfig, schema: FeatureSchema) -> None:
        super().__init__()
        n, dim, schema = len(schema.numeric), config.embedding_dim, held_schema(config, schema)
        mixed = len(table_groups(config, schema)) > 1
        self.summed, self.nodes = summed_tables(config, schema), node_tables(schema)
        self.tables: Tables | None = None
        if schema.tables:
            self.tables = MixedTables(config, schema) if mixed else EmbeddingTables(schema, dim)
        self.growing = GrowingRows(schema) if schema.growing else None
        self.mixed = MixedEmbeddings(config, schema) if mixed else None
        self.numeric = (
            nn.Sequential(mlp(n, config.numeric_mlp, dropout=0.0), Linear((n, *config.numeric_mlp)[-1], dim))
            if n
            else None
        )

    def forward(self, batch: FeatureBatch, dtype: torch.dtype) -> Tensor:
        """Categorical tables, multi-hot tables, then the numeric embedding, in the schema's order.

        Tables are fp32 whatever the dense part computes in, which is `dtype`. Ids of growing tables are looked
        for here, unless who trains has given them rows before.
        """
        if self.growing is not None and batch.keys is not None:
            batch = self.growing(batch)
        parts = [e.to(dtype) for e in self.tables(batch)] if self.tables is not None else []
        numeric_BD = self.numeric(batch.numeric_BK.to(dtype)) if self.numeric is not None else None
        if self.summed:
            parts[0], buckets_BND = parts[0].split([parts[0].shape[1] - self.summed, self.summed], dim=1)
            numeric_BD = numeric_BD + buckets_BND.sum(dim=1)
        if self.nodes:
            assert batch.share_BN is not None
            kept, nodes = parts[0].shape[1] - 2 * self.nodes, (self.nodes, self.nodes)
            *first, even_BND, odd_BND = parts[0].split([kept, *nodes] if kept else nodes, dim=1)
            parts[:1] = [*first, interpolate(even_BND, odd_BND, batch.share_BN.to(dtype))]
        if self.mixed is not None:
            return self.mixed(parts, numeric_BD)  # type: ignore[no-any-return]
        if numeric_BD is not None:
            parts.append(numeric_BD.unsqueeze(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def feature_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """The cost of `FeatureProcessing`: a lookup row for each table, maps of shorter ones, the numeric MLP."""
    dims, held = table_dims(config, schema), held_schema(config, schema)
    rows: list[CostRow] = []
    for table, dim in zip(held.tables, dims, strict=True):
        name, values = f"table.{table.name}", table.mean_ids * dim
        rows.append(CostRow(name, LOOKUP, 0.0, table.rows * dim, bytes=values * EMBEDDING_BYTES))
        if table.multi_hot:
            rows.append(CostRow(f"{name}.pooling", ELEMENTWISE, values))
    return (*rows, *_dense_cost(config, schema))


def taped_features(
    config: ModelConfig, schema: FeatureSchema, setting: TapeSetting, *, raw: bool
) -> TapedSegment:
    """`FeatureProcessing` from looked-up embeddings (fp32, given to the tape) to x_BMD.

    `raw`: whether the model keeps the numeric inputs for its layers.
    """
    dim, n, schema = config.embedding_dim, len(schema.numeric), held_schema(config, schema)
    tape, flops = Tape(*setting), headline_flops(_dense_cost(config, schema))
    groups = looked_up(config, schema)
    wholes = []
    for group in groups:
        # looked up together, fp32; what is lifted may be saved as it is, and is counted with the batch alone
        given = tape.beside if group.dim < dim else tape.input
        wholes.append(tape.cast(given(len(group.places) * group.dim, FP32_BYTES), tape.itemsize))
    embeddings = list(wholes)
    casts, numeric = tape.itemsize != FP32_BYTES, []
    if n:
        numbers = tape.scratch(n) if casts else tape.beside(n)
        hidden = mlp_tape(tape, numbers, n, config.numeric_mlp, dropout=0.0, x_needs_gradient=False)
        width = (n, *config.numeric_mlp)[-1]
        numeric.append(linear_tape(tape, hidden, width, dim, x_needs_gradient=bool(config.numeric_mlp)))
    if summed := summed_tables(config, schema) * dim:
        kept = tape.values(embeddings[0]) - summed
        *first, buckets = tape.split(embeddings[0], [kept] * bool(kept) + [summed])
        embeddings[:1] = first or embeddings[:1]
        numeric = [tape.add(*numeric, tape.operation(dim, [buckets], passes=True))]
    if nodes := node_tables(schema):
        kept = tape.values(embeddings[0]) - 2 * nodes * dim
        *first, even, odd = tape.split(embeddings[0], [kept] * bool(kept) + [nodes * dim] * 2)
        embeddings[:1] = [*first, interpolation_tape(tape, even, odd, nodes)]
    if len(table_groups(config, schema)) > 1:
        x = mixed_tape(tape, embeddings, numeric, config, schema)
    else:
        parts = [*embeddings, *numeric]
        x = parts[0] if len(parts) == 1 else tape.concat(parts)
        tape.refer(*parts)
    tape.refer(*wholes)
    if raw and casts:
        tape.operation(0, [], saves=[tape.scratch(n)])
    return TapedSegment("features", flops, tape, x)


def _dense_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """Maps of shorter tables, the numeric MLP, and what takes buckets in."""
    rows, dim = lift_cost(config, schema), config.embedding_dim
    if not schema.numeric:
        return rows
    rows += mlp_cost("numeric", len(schema.numeric), (*config.numeric_mlp, dim))[:-1]
    if summed := summed_tables(config, schema):
        return (*rows, elementwise_cost("numeric.buckets", summed * dim))
    nodes = node_tables(held_schema(config, schema))
    return (*rows, interpolation_cost(nodes, dim)) if nodes else rows
