"""From kept logits to sums of losses by block of examples: what the bootstrap resamples in place of rows.

A block holds rows that depend on each other: rows that lie together in time (or in the log's order, without
time stamps), or all rows of a user. Losses are those of `trials.records.metrics`, weighted and corrected for
negative sampling as `trials.training.evaluation` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.errors import UserError
from dhen.members import mean_of_logits
from trials.data.prepared_log import PreparedLog, Split
from trials.data.vocabulary import MISSING_ID, MISSING_KEY, UNKNOWN_ID
from trials.records.metrics import PROBABILITY_FLOOR, Floats, example_weights
from trials.store.weights import read_logits

# Which slice each row of a split falls into: the values of a column, or the tenths of a numeric one.

TENTHS = 10
NOISE = 1e-6
"""Share of the largest value that fp32 does not resolve."""


Groups = tuple[NDArray[np.integer[Any]], tuple[str, ...]]
"""The slice of each of N rows, and the names of slices: the largest first and the rest joined, or ascending for a
numeric column."""


def groups_of(log: PreparedLog, split: Split, column: str, most: int) -> Groups:
    """Groups by the values of a categorical column (`most` of them, the others joined), or a numeric one's tenths.

    Raises:
        UserError: for a column that is neither.
    """
    columns = categorical_ids(log, split)
    if column in log.schema.numeric and column not in columns:
        return _by_tenth(log.encoding.numbers(column, np.asarray(split.inputs.numeric)))
    if column not in columns:
        known = ", ".join((*columns, *log.schema.numeric))
        raise UserError(f"--column {column!r}: expected a categorical or numeric column of the log: {known}.")
    ids, index_N, counts = np.unique(columns[column], return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    names = log.encoding.value_names(column, ids[order[:most]].tolist())
    if len(ids) > most:
        names.append(f"({len(ids) - most} other{'s' if len(ids) - most > 1 else ''})")
    return np.minimum(rank, most)[index_N], tuple(names)


def categorical_ids(log: PreparedLog, split: Split) -> dict[str, NDArray[np.integer[Any]]]:
    """Views of the rows' ids (N) by categorical column, in the log's order; of growing tables the keys."""
    columns: dict[str, NDArray[np.integer[Any]]] = {
        table.name: np.asarray(split.inputs.categorical[:, index])
        for index, table in enumerate(log.features.categorical)
    }
    keys, tables = split.inputs.keys, log.features.categorical
    if keys is not None:
        growing = enumerate(log.features.growing_columns)
        columns |= {tables[column].name: np.asarray(keys[:, place]) for place, column in growing}
    return columns


def _by_tenth(value_N: NDArray[np.float64]) -> Groups:
    missing_N = np.isnan(value_N)
    present = value_N[~missing_N]
    edges = np.unique(np.quantile(present, np.arange(1, TENTHS) / TENTHS)) if len(present) else present
    group_N = np.searchsorted(edges, value_N, side="left")
    group_N[missing_N] = len(edges) + 1
    groups, group_N = np.unique(group_N, return_inverse=True)
    # zeros where standardisation in fp32 has left almost zero
    small_N = np.abs(value_N) < NOISE * np.nanmax(np.abs(value_N), initial=0.0)
    known_N, names = np.where(small_N, 0.0, value_N), []
    for index, group in enumerate(groups):
        low, high = (f"{end(known_N[group_N == index]):.4g}" for end in (np.min, np.max))
        names.append("(missing)" if group > len(edges) else low if low == high else f"{low} to {high}")
    return group_N, tuple(names)


BLOCKS = 200
"""Largest number of blocks: the standard error of a block bootstrap is then known to 5 %, and blocks are long."""
LEAST_ROWS = 10
"""Smallest number of rows of a block, on average."""
ROWS_AT_ONCE = 1 << 20
TIME, ORDER = "time", "order"
"""What rows of a block have in common if no column is named; `order` in logs without time stamps."""
HASH = np.uint64(0x9E3779B97F4A7C15)
"""Factor of Fibonacci hashing (Knuth, volume 3, 6.4): neighbouring ids go to blocks far apart."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Which block each row of a split belongs to."""

    block_N: NDArray[np.integer[Any]]
    count: int
    by: str
    """What rows of a block have in common: `time`, `order`, or a column's name."""


def blocks_of(log: PreparedLog, split: Split, column: str | None = None) -> Blocks:
    """Blocks by a column's values; blocks of consecutive rows for None, `time` and `order`.

    Raises:
        UserError: for a column that is not categorical, or a split of fewer than two rows.
    """
    if split.rows < 2:
        raise UserError(f"an interval over examples needs two {split.name} rows at least, not {split.rows}.")
    count = max(2, min(BLOCKS, split.rows // LEAST_ROWS))
    by = ORDER if split.timestamp is None else TIME
    position_N = np.arange(split.rows)
    if split.timestamp is not None and not split.chronological:
        position_N = np.empty_like(position_N)
        position_N[np.argsort(split.timestamp, kind="stable")] = np.arange(split.rows)
    block_N: NDArray[np.integer[Any]] = (position_N * count // split.rows).astype(np.int32)
    ids = categorical_ids(log, split)
    if column in (TIME, ORDER) and column not in ids:
        column = None
    if column is not None:
        if column not in ids:
            known = ", ".join(ids) or "none"
            raise UserError(f"blocks by {column!r}: expected a categorical column of the log: {known}.")
        # all rows of a value are together; those of an unknown value lie as they do in time
        id_N = ids[column]
        hashed_N = ((id_N.astype(np.uint64) * HASH) >> np.uint64(32)) % np.uint64(count)
        known_N = (id_N != MISSING_ID) & (id_N != UNKNOWN_ID) & (id_N != np.int64(MISSING_KEY))
        by_value_N = np.where(known_N, hashed_N.astype(np.int32), block_N)
        filled, block_N = np.unique(by_value_N, return_inverse=True)
        count, by = len(filled), column
    if split.pair is not None:  # two rows that were one stay together
        second = np.flatnonzero(split.pair)
        block_N[second] = block_N[second - 1]
    if count < 2:
        raise UserError(f"blocks by {column!r}: all {split.name} rows have one value; name another column.")
    return Blocks(block_N=block_N, count=count, by=by)


def block_sums(logits: Sequence[Path], split: Split, rate: float, blocks: Blocks) -> Floats:
    """Sums of the rows' weighted losses, by block (K).

    Args:
        logits: the file of the split's logits (N), as a model gave them; for an average a file of each member.
        split: the split that was scored.
        rate: the fraction of negatives that the log kept.
        blocks: blocks of the split.
    """
    member_logits = [read_logits(file) for file in logits]
    assert all(len(logit_N) == split.rows for logit_N in member_logits)
    weights = example_weights(split.labels, split.weight, rate)
    sums_K = np.zeros(blocks.count)
    for first in range(0, split.rows, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        logit_N = mean_of_logits([logits_N[rows] for logits_N in member_logits], rate)
        loss = losses(logit_N, np.asarray(split.labels[rows]), rate)
        loss *= 1.0 if weights is None else weights[rows]
        sums_K += np.bincount(blocks.block_N[rows], loss, blocks.count)
    return sums_K


def losses(logit_N: NDArray[np.float32], label_N: NDArray[np.float32], rate: float) -> Floats:
    """Cross-entropy of each row, with predictions corrected for negative sampling.

    The corrected logit of a logit z is z + log(rate) (He et al. 2014, section 6.3, in logits).
    """
    bound = -np.log(PROBABILITY_FLOOR)
    corrected_N = np.clip(logit_N.astype(np.float64) + np.log(rate), -bound, bound)
    loss: Floats = np.logaddexp(0.0, np.where(label_N > 0.5, -corrected_N, corrected_N))
    return loss
