"""Which engine holds the tables: one process's own, on its device or below, or TorchRec's over several ranks.

TorchRec is imported only if several ranks train: one rank does without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dhen.inputs.features import Tables, matrices
from dhen.schema import FeatureSchema
from trials.planner.table_placement import Placement
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks, TableLevel
from trials.training.embeddings.engine import LocalTables, TableEngine
from trials.training.embeddings.levels import CachedTables
from trials.training.embeddings.requirements import check_tables
from trials.training.memory_limit import on_device_for_good


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
    """Returns the engine for so many ranks; None if a model has no tables.

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
    from trials.training.embeddings.sharded import ShardedTables

    assert placement is not None
    check_tables(placement, ranks)
    return ShardedTables(tables, schema, config, ranks, placement, where)


# L2 regularisation of embeddings by how often their ids occur (`training.frequency_decay`).
#
# To the gradient of every embedding that an example looks up, frequency_decay / n times the embedding is added,
# with n the number of training rows that have its id. Over a pass an embedding decays alike however often it
# occurs; in one step a rare one decays far more than a frequent one. It is the mini-batch aware regularisation
# of Deep Interest Network (arXiv 1706.06978, equation 6), but that every occurrence in a batch counts, where the
# paper counts an id once per batch. A multi-hot table's embedding decays as it is looked up, the mean of its
# bag, by the mean of 1 / n; nodes of a number, between which a model interpolates, decay by the count of the
# bucket between them.
#
# It is added where the dense part leaves its gradients on the embeddings, and so alike for all engines that hold
# tables, fused updates included.


class FrequencyDecay:
    """The decay of one model's embeddings on this rank."""

    def __init__(self, tables: Tables, categorical: int, decay: float, ranks: int) -> None:
        """Notes which looked-up tensor has which tables.

        Args:
            tables: the model's tables, which lookups follow in their order.
            categorical: number of the log's categorical columns; multi-hot ones come after them.
            decay: `training.frequency_decay`.
            ranks: number of ranks that gradients are averaged over.
        """
        self._columns: list[list[int]] = []
        for matrix in matrices(tables).values():
            if matrix.row_offsets.numel():
                self._columns.append(list(matrix.ids.read))
            self._columns += [[categorical + place] for place in matrix.bags]
        # a sum over examples, which must not be divided by the number of ranks with the mean of the loss
        self._factor = decay * ranks

    @torch.no_grad()
    def __call__(self, embeddings: Sequence[Tensor], inverse_count_BT: Tensor) -> None:
        """Adds to the gradients of looked-up embeddings (B, tables, D)."""
        for embedding, columns in zip(embeddings, self._columns, strict=True):
            assert embedding.grad is not None
            there = slice(columns[0], columns[-1] + 1)  # a view; of a list an accelerator would wait
            in_turn = columns == list(range(there.start, there.stop))
            inverse_BT = inverse_count_BT[:, there if in_turn else columns]
            embedding.grad.addcmul_(embedding, inverse_BT.unsqueeze(2), value=self._factor)
