"""How often the training rows have each id, for `training.frequency_decay`.

Counted anew by every rank when a training begins, in one pass over the ids; the counts stay in the host's memory,
four bytes for each row of a table, and what a batch needs of them travels with it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trials.data.cache import Split
from trials.data.rows import Bags, EncodedRows

IDS_AT_ONCE = 2**22
"""Ids counted at a time: numpy makes int64 of them."""


class IdCounts:
    """The counts of all ids in the last rows of a split, as 1 / count."""

    def __init__(self, split: Split, rows: int) -> None:
        """Counts the ids in the last `rows` rows."""
        ids, first = split.categorical, split.rows - rows
        columns = [_counts(ids[first:, column]) for column in range(ids.shape[1])]
        bags = [_counts(each.ids[each.offsets[first] :]) for each in split.bags]
        self._columns, self._bags = _inverse(columns), _inverse(bags)

    def inverse(self, inputs: EncodedRows) -> NDArray[np.float32]:
        """Returns 1 / count for each categorical table and then each multi-hot one (N x T).

        The rows must be among those that were counted. A bag has the mean over its ids, an empty one 0.
        """
        columns = [inverse[ids] for inverse, ids in zip(self._columns, inputs.categorical.T, strict=True)]
        bags = [_means(inverse, each) for inverse, each in zip(self._bags, inputs.bags, strict=True)]
        return np.stack([*columns, *bags], axis=1)


def _counts(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns how often each id from 0 to the largest one is there."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        some = np.bincount(ids[start : start + IDS_AT_ONCE], minlength=len(counts))
        some[: len(counts)] += counts
        counts = some
    return counts


def _inverse(counts: list[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """Returns 1 / count; ids that are not there have 1, and are never asked for."""
    return [(1.0 / np.maximum(count, 1)).astype(np.float32) for count in counts]


def _means(inverse: NDArray[np.float32], bags: Bags) -> NDArray[np.float32]:
    """Returns the mean over each bag's ids."""
    lengths = np.diff(bags.offsets)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owners, weights=inverse[bags.ids], minlength=len(lengths))
    return (sums / np.maximum(lengths, 1)).astype(np.float32)
