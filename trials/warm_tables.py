"""Embedding tables that start from those of a trained model, in place of fresh ones.

Rows belong to the ids of the log, whatever model reads them. Where dimensions differ, the columns that both
have are copied as they are, and columns that only the new tables have stay fresh: they are drawn at a
twentieth of a unit (`dhen.features.EMBEDDING_INIT_STD`), so that at first they add little to what the trained
ones say, and nothing is scaled, since the layers that read them are fresh and learn any scale. The
optimizer's state is not taken over. What this does to the ranking of candidates is measured by
`benchmarks/warm_tables.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dhen.errors import UserError
from trials.checkpoint import read_weights
from trials.distributed_step import TABLES
from trials.ranks import Ranks


@torch.no_grad()
def start_tables_from(weights: Path, model: nn.Module, ranks: Ranks) -> None:
    """Puts trained tables into a fresh model, alike on all ranks; a collective where there are several.

    Args:
        weights: of a model of any family on the same log; read by the first rank alone, as hosts need not share
            a disk.
        model: in host memory, its tables in fp32.
        ranks: that train it together.

    Raises:
        UserError: for weights that are missing, damaged, without tables, or of another log.
    """
    table_RD = model.get_parameter(TABLES).detach()
    if ranks.first:
        trained_RD = read_weights(weights).get(TABLES)
        if trained_RD is None or len(trained_RD) != len(table_RD):
            found = "no tables" if trained_RD is None else f"tables of {len(trained_RD):,} rows"
            raise UserError(f"{weights} has {found}; this log's have {len(table_RD):,} rows.")
        common = min(trained_RD.shape[1], table_RD.shape[1])
        table_RD[:, :common] = trained_RD[:, :common]
    if ranks.world > 1:
        dist.broadcast(table_RD, 0)
