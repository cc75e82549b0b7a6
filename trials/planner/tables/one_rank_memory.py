"""Memory of lookup and update of tables in one process, beside the tables: what a gradient needs, and its sums.

One process has the tables of one length in one matrix. `embedding_bag` saves what its gradient needs from the
lookup to backward; then gradients have a row for each id, and `trials.optim.rowwise_adagrad` sums those of one
row, takes its step, and rounds what is kept in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dhen.inputs.table_dims import TableGroup
from dhen.schema import Table
from trials.planner.tables.table_cost import FP32_BYTES

INDEX_BYTES = 8
BAG_INDICES = 3
"""Integers (int64) that `embedding_bag` keeps per bag: where it begins, its size, a place for maxima. Per id it
keeps one, the bag it belongs to."""
COLUMNS_PER_ROW = 3
"""Widths of an embedding held for each row that is updated: its gradients' sum, its weights, their squares
(trials/optim/rowwise_adagrad.py)."""
ROWS_BESIDE_ROUNDING = 2
"""Widths of those `COLUMNS_PER_ROW` that are still held while new weights are rounded."""
INDICES_AN_ID = 2
"""Integers (int64) held for each id beside the gradient's own index while gradients are summed: places and
representatives (trials/optim/rowwise_adagrad.py)."""
ROW_NUMBERS = 2
"""Integers (int64) held for each row that is updated: while gradients are summed, its number and the place of its
first lookup; then its number, the optimizer's sum and the mean of squares that is added to it, in fp32."""


def saved_bytes(tables: Sequence[Table], multi_hot: Sequence[Table], examples: int) -> int:
    """Returns what the lookup of so many examples saves for its gradient: row numbers, and of bags, which are of
    `multi_hot`, also what `embedding_bag` keeps."""
    saved = sum(table.mean_ids for table in tables)
    saved += sum(table.mean_ids + BAG_INDICES for table in multi_hot)
    return round(examples * INDEX_BYTES * saved)


def update_bytes(
    groups: Sequence[TableGroup],
    tables: Sequence[Table],
    examples: int,
    rounding_bytes: Callable[[int], int],
) -> int:
    """Returns what the update of the tables takes: gradients of all matrices, which `groups` says, and what the
    dearest of their updates takes beside them. `rounding_bytes` says what rounding so many numbers takes."""
    found = [_group_bytes(group, tables, examples, rounding_bytes) for group in groups]
    return sum(gradients for gradients, _ in found) + max((beside for _, beside in found), default=0)


def _group_bytes(
    group: TableGroup, tables: Sequence[Table], examples: int, rounding_bytes: Callable[[int], int]
) -> tuple[int, int]:
    """Returns the gradients of tables in one matrix, and what the matrix's update takes beside all gradients:
    duplicates are summed, or new weights rounded, or gradients of both kinds of tables joined."""
    here, width = [tables[index] for index in group.places], FP32_BYTES * group.dim
    ids = [table.mean_ids * examples for table in here]
    rows = [min(table.rows, count) for table, count in zip(here, ids, strict=True)]
    joined = len({table.multi_hot for table in here}) - 1
    gradients = round(sum(ids) * (width + INDEX_BYTES))
    summing = round(sum(rows) * (width + ROW_NUMBERS * INDEX_BYTES))
    summing += round(max(sum(rows) * (COLUMNS_PER_ROW - 1) * width, sum(ids) * INDICES_AN_ID * INDEX_BYTES))
    numbers = round(sum(rows)) * group.dim
    rounding = ROWS_BESIDE_ROUNDING * numbers * FP32_BYTES + rounding_bytes(numbers)
    return gradients, max(summing, rounding, joined * gradients)
