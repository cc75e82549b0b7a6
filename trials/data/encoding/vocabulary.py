"""The values of one table that have ids of their own, and how text finds its id."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.encoding.hashing import Hashes, hash64
from trials.data.raw.text import Codes, spelled

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
"""Id of missing values; after it that of out-of-vocabulary values, and the first of all other values."""
HASH = "hash"
"""Name of the column that has the values' hashes, in the file of a vocabulary without values."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Values in the order of their ids: most frequent first, equally frequent ones by their text."""

    values: pa.Array
    counts: NDArray[np.int64]
    """Number of times that each value occurs in the training rows."""
    _spelled: pa.Array = field(init=False, repr=False)
    _hashes: Hashes = field(init=False, repr=False)
    _positions: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # one that was written before values had one spelling may have more; of two for one value the first counts
        object.__setattr__(self, "_spelled", spelled(self.values))
        hashes = hash64(self._spelled)
        order = np.argsort(hashes, kind="stable")
        object.__setattr__(self, "_hashes", hashes[order])
        object.__setattr__(self, "_positions", order)

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def fit(cls, counted: pa.Table, min_count: int) -> Vocabulary:
        """Makes a vocabulary from distinct `value`s and their `count`s."""
        frequent = counted.filter(pc.greater_equal(counted["count"], min_count))
        frequent = frequent.sort_by([("count", "descending"), ("value", "ascending")])
        return cls(_one_array(frequent["value"]), frequent["count"].to_numpy())

    def ids(self, values: pa.Array) -> Codes:
        """Returns the ids (N) of N values without nulls.

        A value is found by its hash and then compared: unlike a hash table's, the index is built once, and
        so a batch costs the same whatever the vocabulary's size.
        """
        if not len(self):
            return np.full(len(values), UNKNOWN_ID, dtype=np.int32)
        hash_index = np.searchsorted(self._hashes, hash64(values))
        position = self._positions[np.minimum(hash_index, len(self) - 1)]
        equal = pc.equal(self._spelled.take(pa.array(position)), values).to_numpy(zero_copy_only=False)
        return np.where(equal, position + FIRST_ID, UNKNOWN_ID).astype(np.int32)

    @property
    def hashes(self) -> Hashes:
        """The hashes of the values, in the order of their ids."""
        found = np.empty_like(self._hashes)
        found[self._positions] = self._hashes
        return found

    def name(self, index: int) -> str:
        """Returns a value, to be read; the first has the index 0."""
        return str(self.values[index])

    def checksum(self) -> list[str]:
        """Returns texts that differ where a value has another id."""
        return [str(len(self)), _sum_of(self.hashes)]

    def save(self, path: Path) -> None:
        """Writes a Parquet file of `value` and `count`; the row number plus 2 is the id."""
        pq.write_table(pa.table({"value": self.values, "count": self.counts}), path)


@dataclass(frozen=True, eq=False)
class HashVocabulary:
    """Values that are known by their hashes alone: they had rows of a growing table, which keeps no values."""

    hashes: Hashes
    """Hashes of the values in the order of their ids, ascending."""

    def __len__(self) -> int:
        return len(self.hashes)

    def ids(self, values: pa.Array) -> Codes:
        """Returns the ids (N) of N values without nulls."""
        hashes = hash64(values)
        if not len(self):
            return np.full(len(hashes), UNKNOWN_ID, dtype=np.int32)
        position = np.minimum(np.searchsorted(self.hashes, hashes), len(self) - 1)
        return np.where(self.hashes[position] == hashes, position + FIRST_ID, UNKNOWN_ID).astype(np.int32)

    def name(self, index: int) -> str:
        """Returns a value's hash, to be read; the first has the index 0."""
        return f"hash {self.hashes[index]:016x}"

    def checksum(self) -> list[str]:
        """Returns texts that differ where a value has another id, and from those of a `Vocabulary`."""
        return ["hashes", str(len(self)), _sum_of(self.hashes)]

    def save(self, path: Path) -> None:
        """Writes a Parquet file of `hash`; the row number plus 2 is the id."""
        pq.write_table(pa.table({HASH: self.hashes}), path)


AnyVocabulary = Vocabulary | HashVocabulary


def load_vocabulary(path: Path) -> AnyVocabulary:
    """Reads what `save` of either kind wrote.

    Raises:
        UserError: when the file is missing or damaged.
    """
    try:
        table = pq.read_table(path)
        if HASH in table.column_names:
            return HashVocabulary(table[HASH].to_numpy())
        return Vocabulary(_one_array(table["value"]), table["count"].to_numpy())
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path}: the vocabulary cannot be read ({error}).") from None


def _sum_of(hashes: Hashes) -> str:
    ids = np.arange(FIRST_ID, FIRST_ID + len(hashes), dtype=np.uint64)
    return str((hashes * ids).sum())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.string())


def hashed_ids(values: pa.Array, buckets: int) -> Codes:
    """Returns the ids (N) of N values without nulls, hashed into buckets."""
    return (hash64(values) % np.uint64(buckets)).astype(np.int32) + FIRST_ID
