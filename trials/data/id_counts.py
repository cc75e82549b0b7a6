"""How often the training rows have each id, for `training.frequency_decay`.

Counted anew by every rank when a training begins, in one pass over the ids; the counts stay in the host's memory,
four bytes for each row of a table (twelve for each key of a growing one), and what a batch needs of them travels
with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trials.data.cache import Split
from trials.data.rows import Bags, EncodedRows

Ids = NDArray[np.int32] | NDArray[np.int64]
IDS_AT_ONCE = 2**22
"""Ids counted at a time: numpy makes int64 of them."""


class IdCounts:
    """The counts of all ids in the last rows of a split, as 1 / count."""

    def __init__(self, split: Split, rows: int, growing: Sequence[int] = ()) -> None:
        """Counts the ids in the last `rows` rows; `growing` are the columns whose ids are keys."""
        inputs, first = split.inputs, split.rows - rows
        self._growing = {column: place for place, column in enumerate(growing)}
        columns = (self._column(inputs, column)[first:] for column in range(inputs.categorical.shape[1]))
        self._columns = [_counted(ids) for ids in columns]
        self._bags = [_counted(bags.ids[bags.offsets[first] :]) for bags in inputs.bags]

    def inverse(self, inputs: EncodedRows) -> NDArray[np.float32]:
        """Returns 1 / count for each categorical table and then each multi-hot one (N x T).

        The rows must be among those that were counted. A bag has the mean over its ids, an empty one 0.
        """
        columns = [counts.inverse(self._column(inputs, place)) for place, counts in enumerate(self._columns)]
        bags = [_means(counts, bags) for counts, bags in zip(self._bags, inputs.bags, strict=True)]
        return np.stack([*columns, *bags], axis=1)

    def _column(self, inputs: EncodedRows, column: int) -> Ids:
        if column not in self._growing:
            return inputs.categorical[:, column]
        assert inputs.keys is not None
        return inputs.keys[:, self._growing[column]]


class _FixedCounts:
    """Counts of ids from 0 on."""

    def __init__(self, ids: Ids) -> None:
        counts = np.zeros(0, dtype=np.int64)
        for start in range(0, len(ids), IDS_AT_ONCE):
            some = np.bincount(ids[start : start + IDS_AT_ONCE], minlength=len(counts))
            some[: len(counts)] += counts
            counts = some
        # ids that are not there have 1, and are never asked for
        self._inverse = (1.0 / np.maximum(counts, 1)).astype(np.float32)

    def inverse(self, ids: Ids) -> NDArray[np.float32]:
        """Returns 1 / count (N)."""
        return self._inverse[ids]


class _KeyCounts:
    """Counts of keys, found by halving: twelve bytes for each distinct one."""

    def __init__(self, ids: Ids) -> None:
        self._keys, counts = np.unique(ids, return_counts=True)
        self._inverse = (1.0 / counts).astype(np.float32)

    def inverse(self, ids: Ids) -> NDArray[np.float32]:
        """Returns 1 / count (N)."""
        return self._inverse[np.searchsorted(self._keys, ids)]


def _counted(ids: Ids) -> _FixedCounts | _KeyCounts:
    return _KeyCounts(ids) if ids.dtype == np.int64 else _FixedCounts(ids)


def _means(counts: _FixedCounts | _KeyCounts, bags: Bags) -> NDArray[np.float32]:
    """Returns the mean over each bag's ids."""
    lengths = np.diff(bags.offsets)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owners, weights=counts.inverse(bags.ids), minlength=len(lengths))
    return (sums / np.maximum(lengths, 1)).astype(np.float32)
