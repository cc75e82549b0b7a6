"""The values of one table that have ids of their own, and how text finds its id."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dhen.errors import UserError
from dhen.values import Value
from trials.data.raw.columns import Codes, spelled

# A 64-bit hash of strings, the same on every machine and in every version of the project.
#
# A polynomial in the bytes modulo 2 ** 64, then the finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
# Vectorised over Arrow's own buffers. Not for adversaries.

_BASE = np.uint64(0x9E3779B97F4A7C15)
_SECOND_BASE, _PRIME = np.uint64(0x5851F42D), np.uint64(2**31 - 1)

Hashes = NDArray[np.uint64]
MISSING_KEY = -0x2B1D5E6C3F9A4871
"""The key that stands for a missing value if it has a row of its own: a number of no meaning, which a value's
hash is as seldom as it is another value's."""


def hash64(values: pa.Array) -> Hashes:
    """Returns the hashes (N) of N strings; those of nulls mean nothing."""
    if not len(values):
        return np.empty(0, dtype=np.uint64)  # Arrow may leave out the buffers
    text, position, starts, lengths = _text(values)
    powers = np.cumprod(np.full(lengths.max(initial=0), _BASE, dtype=np.uint64), dtype=np.uint64)
    return mixed(_sums(text * powers[position], starts, lengths))


def second_hash(values: pa.Array) -> Hashes:
    """Returns hashes (N) of N strings by which those that share the first one are told apart: the polynomial in
    another number, modulo a prime."""
    if not len(values):
        return np.empty(0, dtype=np.uint64)
    text, position, starts, lengths = _text(values)
    powers = np.ones(1, dtype=np.uint64)
    while len(powers) < lengths.max(initial=0):
        following = np.uint64(pow(int(_SECOND_BASE), len(powers), int(_PRIME)))
        powers = np.concatenate([powers, powers * following % _PRIME])
    return _sums(text * powers[position] % _PRIME, starts, lengths) % _PRIME


def _text(values: pa.Array) -> tuple[Hashes, NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Returns the bytes of all strings one after another, from 1 on, the place of each in its string, where each
    string begins, and its length."""
    _, offset_buffer, data_buffer = values.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    text = np.frombuffer(data_buffer or b"", dtype=np.uint8)[offsets[0] : offsets[-1]]
    starts, lengths = offsets[:-1] - offsets[0], np.diff(offsets)
    position = np.arange(len(text)) - np.repeat(starts, lengths)
    return text.astype(np.uint64) + np.uint64(1), position, starts, lengths


def _sums(terms: Hashes, starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> Hashes:
    """Returns the sum of each string's terms (N) modulo 2 ** 64."""
    # sums wrap around, and so their differences are exact modulo 2 ** 64
    sums = np.concatenate(([np.uint64(0)], np.cumsum(terms, dtype=np.uint64)))
    found: Hashes = sums[starts + lengths] - sums[starts]
    return found


def mixed(h: Hashes) -> Hashes:
    """Returns 64-bit numbers (N) that look random, each of one given number: the finaliser of SplitMix64."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
"""Id of missing values; after it that of out-of-vocabulary values, and the first of all other values."""
HASH = "hash"
"""Name of the column that has the values' hashes, in the file of a vocabulary without values."""


class Vocabulary:
    """Values in the order of their ids: most frequent first, equally frequent ones by their text; or, of a column
    that had a growing table, which keeps no values, their hashes, ascending."""

    def __init__(self, table: pa.Table) -> None:
        """Takes the `value`s with their `count`s in the training rows, or the `hash`es, in the order of ids."""
        self.values: pa.Array | None = None
        if HASH in table.column_names:
            self.hashes: Hashes = table[HASH].to_numpy()
        else:
            column, self.counts = table["value"], table["count"].to_numpy()
            self.values = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], pa.string())
            # one that was written before values had one spelling may have more; of two for one the first counts
            self._spelled = spelled(self.values)
            self.hashes = hash64(self._spelled)
        self._order = np.argsort(self.hashes, kind="stable")
        self._ascending = self.hashes[self._order]

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def fit(cls, counted: pa.Table, min_count: int) -> Vocabulary:
        """Makes a vocabulary from distinct `value`s and their `count`s."""
        frequent = counted.filter(pc.greater_equal(counted["count"], min_count))
        return cls(frequent.sort_by([("count", "descending"), ("value", "ascending")]))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Reads what `save` wrote.

        Raises:
            UserError: when the file is missing or damaged.
        """
        try:
            return cls(pq.read_table(path))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise UserError(f"{path}: the vocabulary cannot be read ({error}).") from None

    def ids(self, values: pa.Array) -> Codes:
        """Returns the ids (N) of N values without nulls.

        A value is found by its hash and then compared: unlike a hash table's, the index is built once, and
        so a batch costs the same whatever the vocabulary's size.
        """
        if not len(self):
            return np.full(len(values), UNKNOWN_ID, dtype=np.int32)
        hashes = hash64(values)
        position = self._order[np.minimum(np.searchsorted(self._ascending, hashes), len(self) - 1)]
        if self.values is None:
            equal = self.hashes[position] == hashes
        else:
            equal = pc.equal(self._spelled.take(pa.array(position)), values).to_numpy(zero_copy_only=False)
        return np.where(equal, position + FIRST_ID, UNKNOWN_ID).astype(np.int32)

    def name(self, index: int) -> str:
        """Returns a value, or its hash, to be read; the first has the index 0."""
        return str(self.values[index]) if self.values is not None else f"hash {self.hashes[index]:016x}"

    def checksum(self) -> list[str]:
        """Returns texts that differ if a value has another id, or only hashes are known."""
        ids = np.arange(FIRST_ID, FIRST_ID + len(self), dtype=np.uint64)
        kind = ["hashes"] if self.values is None else []
        return [*kind, str(len(self)), str((self.hashes * ids).sum())]

    def save(self, path: Path) -> None:
        """Writes a Parquet file of `value` and `count`, or of `hash`; the row number plus 2 is the id."""
        known = (
            {"value": self.values, "count": self.counts} if self.values is not None else {HASH: self.hashes}
        )
        pq.write_table(pa.table(known), path)


def hashed_ids(values: pa.Array, buckets: int) -> Codes:
    """Returns the ids (N) of N values without nulls, hashed into buckets."""
    return (hash64(values) % np.uint64(buckets)).astype(np.int32) + FIRST_ID


# Buckets of a number: quantiles of the training rows as the values of a categorical column.
#
# A network takes in a standardised number linearly; a row of an embedding table for each bucket lets it learn a
# step function of it, as trees have, and lets interaction modules cross it with other columns.

Shares = NDArray[np.float32]


class Buckets(Value):
    """The boundaries of the buckets of a numeric column."""

    begins: tuple[float, ...]
    """Beginnings of all buckets but the first, ascending; the first bucket has all smaller values."""

    def __len__(self) -> int:
        return len(self.begins) + 1

    def ids(self, values: NDArray[np.float64]) -> NDArray[np.int32]:
        """Returns the id of each value's bucket (N), that of a missing value if it is NaN."""
        positions = np.searchsorted(self.begins, values, side="right")
        return np.where(np.isnan(values), MISSING_ID, positions + FIRST_ID).astype(np.int32)

    def odd_shares(
        self, values: NDArray[np.float64], scaled: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> Shares:
        """Returns how far each value (N) is from the even towards the odd one of the two beginnings around it.

        The beginning of bucket i is even if i is. Values of the first and of the last bucket, which have one
        end each, count as lying on its beginning, and missing ones as lying on an even one.

        Args:
            values: numbers as the log has them; NaN if missing.
            scaled: the scale on which distances are taken; it keeps the order of numbers.
        """
        positions = np.searchsorted(self.begins, values, side="right")
        ends = np.pad(scaled(np.array(self.begins)), 1)
        lower, upper = ends[positions], ends[np.minimum(positions + 1, len(self.begins))]
        inside = (positions > 0) & (positions < len(self.begins)) & (upper > lower)
        distance = np.divide(scaled(values) - lower, upper - lower, out=np.zeros(len(values)), where=inside)
        shares = np.where(positions % 2, 1.0 - distance, distance)
        return np.where(np.isnan(values), 0.0, shares).astype(np.float32)

    def name(self, index: int) -> str:
        """Returns the range of values of a bucket, to be read."""
        if index == 0:
            return f"below {self.begins[0]:.6g}"
        if index == len(self.begins):
            return f"from {self.begins[-1]:.6g}"
        return f"{self.begins[index - 1]:.6g} to below {self.begins[index]:.6g}"


def quantile_buckets(values: NDArray[np.float64], most: int) -> Buckets:
    """Returns the buckets of values (N, none NaN) of which the one with most values has as few as can be.

    A value that occurs more often than that has a bucket of its own, which leaves the others to the rest: of an
    amount that is zero in nine of ten rows, nearly all buckets are of what is not zero.

    Args:
        values: the training rows' (a sample of them does).
        most: number of buckets there may be; there are fewer if values are equal.
    """
    distinct, counts = np.unique(values, return_counts=True)
    ends = np.cumsum(counts)

    def begins(size: int) -> list[int]:
        """Returns where buckets of at most so many values (or of one distinct value) begin; `most` + 1 will do."""
        positions = [0]
        while len(positions) <= most:
            values_before = ends[positions[-1] - 1] if positions[-1] else 0
            after = max(positions[-1] + 1, int(np.searchsorted(ends, values_before + size, side="right")))
            if after >= len(distinct):
                break
            positions.append(after)
        return positions

    sizes = range(1, len(values) + 1)
    least = bisect_left(sizes, True, key=lambda size: len(begins(size)) <= most)
    return Buckets(begins=tuple(distinct[begins(sizes[least])[1:]].tolist()) if len(values) else ())
