"""Embedding tables that start from those of a trained model, in place of fresh ones.

Rows belong to the ids of the log, whatever model reads them. Where dimensions differ, the columns that both
have are copied as they are, and columns that only the new tables have stay fresh: they are drawn at a
twentieth of a unit (`dhen.inputs.features.EMBEDDING_INIT_STD`), so that at first they add little to what the
trained ones say, and nothing is scaled, since the layers that read them are fresh and learn any scale. The
optimizer's state is not taken over. What this does to the ranking of candidates is in
`docs/log.md`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhen.errors import UserError
from dhen.inputs.features import FeatureProcessing, matrices
from dhen.schema import FeatureSchema
from trials.ranks import Ranks
from trials.storage.weights_file import read_weights

TABLES = "features.tables.weight"
"""What a model whose tables all have one length calls their matrix."""


@torch.no_grad()
def start_tables_from(weights: Path, model: nn.Module, schema: FeatureSchema, ranks: Ranks) -> None:
    """Puts trained tables into a fresh model, alike on all ranks; a collective where there are several.

    Args:
        weights: of a model of any family on the same log, whose tables all have one length; read by the first
            rank alone, as hosts need not share a disk.
        model: in host memory, its tables in fp32.
        schema: its inputs.
        ranks: that train it together.

    Raises:
        UserError: for weights that are missing, damaged, without such tables, or of another log.
    """
    features = model.features
    assert isinstance(features, FeatureProcessing)
    assert features.tables is not None
    own = list(matrices(features.tables).values())
    if ranks.first:
        trained = _trained_tables(weights, schema)
        for matrix in own:
            rows = torch.split(matrix.weight, [table.rows for table in matrix.tables])
            for table, fresh_RD in zip(matrix.tables, rows, strict=True):
                common = min(trained[table.name].shape[1], fresh_RD.shape[1])
                fresh_RD[:, :common] = trained[table.name][:, :common]
    if ranks.world > 1:
        for matrix in own:
            dist.broadcast(matrix.weight, 0)


def _trained_tables(weights: Path, schema: FeatureSchema) -> dict[str, Tensor]:
    """By name."""
    trained_RD = read_weights(weights).get(TABLES)
    if trained_RD is None or len(trained_RD) != schema.total_rows:
        found = "no tables of one length" if trained_RD is None else f"tables of {len(trained_RD):,} rows"
        raise UserError(f"{weights} has {found}; this log's have {schema.total_rows:,} rows.")
    starts = itertools.accumulate((table.rows for table in schema.tables), initial=0)
    return {
        table.name: trained_RD[first : first + table.rows]
        for table, first in zip(schema.tables, starts, strict=False)
    }
