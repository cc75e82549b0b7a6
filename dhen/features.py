"""Feature processing: sparse ids and raw numbers become the embeddings x_BMD (paper, section 3.1).

One embedding a table (multi-hot bags are averaged) and one for all numeric inputs, by an MLP. All
tables have one dimension and lie in one matrix, so every categorical column is looked up at once; its
gradient is sparse. What a table's first row is belongs to `row_offsets`; sharding is not decided here.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.batch import FeatureBatch
from dhen.config import ModelConfig
from dhen.cost import ELEMENTWISE, LOOKUP, CostRow, Costs, headline_flops
from dhen.linear import Linear, linear_tape
from dhen.parts import mlp, mlp_cost, mlp_tape
from dhen.schema import FeatureSchema, Table
from dhen.segment import Setting, Taped
from dhen.tape import FP32_BYTES, Tape

EMBEDDING_INIT_STD = 0.05
"""Standard deviation of fresh embeddings; small beside the layers' unit-variance outputs."""
EMBEDDING_BYTES = 4


class EmbeddingTables(nn.Module):
    """All tables of a schema as one matrix of (rows of all tables, D)."""

    row_offsets: Tensor

    def __init__(self, schema: FeatureSchema, dim: int) -> None:
        super().__init__()
        starts = [0, *itertools.accumulate(table.rows for table in schema.tables)]
        n = len(schema.categorical)
        self.bag_offsets = tuple(starts[n:-1])
        self.register_buffer("row_offsets", torch.tensor(starts[:n], dtype=torch.int64), persistent=False)
        self.weight = nn.Parameter(torch.empty(schema.total_rows, dim))
        nn.init.normal_(self.weight, std=EMBEDDING_INIT_STD)

    def forward(self, batch: FeatureBatch) -> list[Tensor]:
        """[e_BTD, e_B1D, ...]: the categorical tables together, then each multi-hot one."""
        looked_up = []
        if self.row_offsets.numel():
            looked_up.append(F.embedding(batch.ids_BT + self.row_offsets, self.weight, sparse=True))
        for rows, (_, offsets_B) in zip(self._bag_rows(batch), batch.bags, strict=True):
            bag_BD = F.embedding_bag(rows, self.weight, offsets_B.long(), mode="mean", sparse=True)
            looked_up.append(bag_BD.unsqueeze(1))
        return looked_up

    def rows(self, batch: FeatureBatch) -> Tensor:
        """The rows of `weight` that a batch reads, in any order, some several times: int64, one dimension."""
        return torch.cat([(batch.ids_BT + self.row_offsets).flatten(), *self._bag_rows(batch)])

    def _bag_rows(self, batch: FeatureBatch) -> list[Tensor]:
        return [ids.long() + start for (ids, _), start in zip(batch.bags, self.bag_offsets, strict=True)]


class FeatureProcessing(nn.Module):
    """FeatureBatch -> x_BMD."""

    def __init__(self, config: ModelConfig, schema: FeatureSchema) -> None:
        super().__init__()
        n, dim = len(schema.numeric), config.embedding_dim
        self.tables = EmbeddingTables(schema, dim) if schema.tables else None
        self.numeric = (
            nn.Sequential(mlp(n, config.numeric_mlp, dropout=0.0), Linear((n, *config.numeric_mlp)[-1], dim))
            if n
            else None
        )

    def forward(self, batch: FeatureBatch, dtype: torch.dtype) -> Tensor:
        """Categorical tables, multi-hot tables, then the numeric embedding, in the schema's order.

        Tables are fp32 whatever the dense part computes in, which is `dtype`.
        """
        parts = [e.to(dtype) for e in self.tables(batch)] if self.tables is not None else []
        if self.numeric is not None:
            parts.append(self.numeric(batch.numeric_BK.to(dtype)).unsqueeze(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def feature_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """The cost of `FeatureProcessing`: a lookup row for each table, the numeric MLP."""
    tables = [row for table in schema.tables for row in _table_cost(table, config.embedding_dim)]
    return (*tables, *_numeric_cost(config, schema))


def taped_features(config: ModelConfig, schema: FeatureSchema, setting: Setting, *, raw: bool) -> Taped:
    """`FeatureProcessing` from looked-up embeddings (fp32, inputs of the tape) to x_BMD.

    `raw`: whether the model keeps the numeric inputs for its layers.
    """
    dim, n = config.embedding_dim, len(schema.numeric)
    tape = Tape(*setting)
    counts = [len(schema.categorical)] * bool(schema.categorical) + [1] * len(schema.multi_hot)
    looked_up = [tape.input(count * dim, FP32_BYTES) for count in counts]
    parts = [tape.cast(e, tape.itemsize) for e in looked_up]
    casts = tape.itemsize != FP32_BYTES
    if n:
        numeric = tape.scratch(n) if casts else tape.beside(n)
        hidden = mlp_tape(tape, numeric, n, config.numeric_mlp, dropout=0.0, x_needs_gradient=False)
        width = (n, *config.numeric_mlp)[-1]
        parts.append(linear_tape(tape, hidden, width, dim, x_needs_gradient=bool(config.numeric_mlp)))
    x = parts[0] if len(parts) == 1 else tape.concat(parts)
    tape.refer(*parts)
    if raw and casts:
        tape.operation(0, [], saves=[tape.scratch(n)])
    return Taped("features", headline_flops(_numeric_cost(config, schema)), tape, x)


def _table_cost(table: Table, dim: int) -> Costs:
    lookup = CostRow(
        name=f"table.{table.name}",
        kind=LOOKUP,
        flops=0.0,
        parameters=table.rows * dim,
        bytes=table.mean_ids * dim * EMBEDDING_BYTES,
    )
    if not table.multi_hot:
        return (lookup,)
    pooling = CostRow(name=f"{lookup.name}.pooling", kind=ELEMENTWISE, flops=table.mean_ids * dim)
    return (lookup, pooling)


def _numeric_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    if not schema.numeric:
        return ()
    return mlp_cost("numeric", len(schema.numeric), (*config.numeric_mlp, config.embedding_dim))[:-1]
