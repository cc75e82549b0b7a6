"""Which engine holds the tables: one process's own, on its device or below, or TorchRec's over several ranks.

TorchRec is imported only where several ranks train: one rank does without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dhen.inputs.features import Tables
from dhen.schema import FeatureSchema
from trials.embeddings.engine import TableEngine
from trials.embeddings.levels.cached_tables import CachedTables
from trials.embeddings.local import LocalTables
from trials.embeddings.requirements import check_tables
from trials.job import TrainingConfig
from trials.memory.limit import on_device_for_good
from trials.planner.tables.placement import Placement
from trials.ranks import Ranks
from trials.strategy import TableLevel


def table_engine(
    tables: Tables | None,
    schema: FeatureSchema,
    config: TrainingConfig,
    ranks: Ranks,
    placement: Placement | None,
    where: torch.device,
    level: TableLevel = "device",
    cached_rows: Sequence[int] = (),
) -> TableEngine | None:
    """Returns the engine for so many ranks; None where a model has no tables.

    Args:
        tables: taken over, and alike on all ranks.
        schema: theirs.
        config: resolved; with what tables are stored in, and sent in.
        ranks: several need a process group that all have joined.
        placement: of the tables on these ranks; one rank needs none.
        where: the device that holds this rank's part; several ranks never hold all tables there.
        level: where the rows lie; below the device for one rank alone.
        cached_rows: there, the number of rows on the device for each matrix.

    Raises:
        UserError: as `check_tables`, which tells before ranks start.
    """
    if tables is None:
        return None
    if level != "device":
        assert ranks.world == 1
        return CachedTables(tables, config, level, cached_rows, where)
    if ranks.world == 1:
        return LocalTables(on_device_for_good(tables, where), config)
    from trials.embeddings.sharded import ShardedTables

    assert placement is not None
    check_tables(placement, ranks)
    return ShardedTables(tables, schema, config, ranks, placement, where)
