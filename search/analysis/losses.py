"""From kept logits to sums of losses by block of examples: what the bootstrap resamples in place of rows.

A block holds rows that depend on each other: rows that lie together in time (or in the log's order, without time
stamps), or all rows of a user. Losses are those of `trials.metrics`, weighted and corrected for negative
sampling as `trials.training.evaluation` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.averaging import mean_of_logits
from dhen.errors import UserError
from search.analysis.row_slices import categorical_ids
from trials.data.cache import PreparedLog, Split
from trials.data.encoding.hashing import MISSING_KEY
from trials.data.encoding.vocabulary import MISSING_ID, UNKNOWN_ID
from trials.data.example_weights import Floats, example_weights
from trials.metrics import PROBABILITY_FLOOR
from trials.storage.logits_file import read_logits

BLOCKS = 200
"""Largest number of blocks: the standard error of a block bootstrap is then known to 5 %, and blocks are long."""
LEAST_ROWS = 10
"""Smallest number of rows of a block, on average."""
ROWS_AT_ONCE = 1 << 20
TIME, ORDER = "time", "order"
"""What rows of a block have in common where no column is named; `order` in logs without time stamps."""
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
    if column in (TIME, ORDER) and column not in categorical_ids(log, split):
        column = None
    if column is not None:
        by_value_N = _by_value(log, split, column, block_N, count)
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
    weights = example_weights(split, rate)
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


def _by_value(
    log: PreparedLog, split: Split, column: str, in_time_N: NDArray[np.integer[Any]], count: int
) -> NDArray[np.integer[Any]]:
    """Blocks in which all rows of a value are together; rows of an unknown value lie as they do in time."""
    ids = categorical_ids(log, split)
    if column not in ids:
        raise UserError(
            f"blocks by {column!r}: expected a categorical column of the log: {', '.join(ids) or 'none'}."
        )
    id_N = ids[column]
    hashed_N = ((id_N.astype(np.uint64) * HASH) >> np.uint64(32)) % np.uint64(count)
    known_N = (id_N != MISSING_ID) & (id_N != UNKNOWN_ID) & (id_N != np.int64(MISSING_KEY))
    return np.where(known_N, hashed_N.astype(np.int32), in_time_N)
