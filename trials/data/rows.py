"""Encoded rows: the inputs of a model for N examples, as arrays (torch-free twin of `FeatureBatch`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """The ids of N examples in one multi-hot table: those of example i are `ids[offsets[i] : offsets[i + 1]]`."""

    ids: NDArray[np.int32] | NDArray[np.int64]
    """Ids, or, of a growing table, keys: 64-bit hashes of the values, 0 where missing."""
    offsets: NDArray[np.int64]
    """Beginnings of the bags, N + 1 numbers, the last one being the number of ids."""

    def take(self, rows: NDArray[np.int64]) -> Bags:
        """Returns the bags of the given examples, in the order given."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        # where an id comes from: its bag's start, plus its place within the bag
        source = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Bags(ids=self.ids[source], offsets=offsets)

    def slice(self, first: int, last: int) -> Bags:
        """Returns the bags of examples first to last - 1."""
        offsets = np.asarray(self.offsets[first : last + 1])
        return Bags(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

    @staticmethod
    def joined(parts: Sequence[Bags]) -> Bags:
        """Returns the bags of the examples of all parts, one part after another."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return Bags(ids=np.concatenate([part.ids for part in parts]), offsets=offsets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedRows:
    """The inputs of N examples, in the order of a `FeatureSchema` (T categorical tables, G growing ones among
    them, K numeric inputs)."""

    categorical: NDArray[np.int32]
    """Ids (N x T), each local to its table; 0 in the columns of growing ones."""
    bags: tuple[Bags, ...]
    """Bags of each multi-hot table."""
    numeric: NDArray[np.float32]
    """Numeric inputs (N x K)."""
    keys: NDArray[np.int64] | None = None
    """64-bit hashes of the values (N x G) of growing categorical tables, 0 where missing; None where there are
    none."""
    share: NDArray[np.float32] | None = None
    """How far each number with buckets is from the even towards the odd one of its nodes (a column for each); None
    where there are no buckets."""

    @property
    def rows(self) -> int:
        """Number of examples, N."""
        return len(self.numeric)

    def take(self, rows: NDArray[np.int64]) -> EncodedRows:
        """Returns the given examples, in the order given (copied)."""
        return EncodedRows(
            categorical=np.take(self.categorical, rows, axis=0),
            bags=tuple(bags.take(rows) for bags in self.bags),
            numeric=np.take(self.numeric, rows, axis=0),
            keys=None if self.keys is None else np.take(self.keys, rows, axis=0),
            share=None if self.share is None else np.take(self.share, rows, axis=0),
        )

    def slice(self, first: int, last: int) -> EncodedRows:
        """Returns examples first to last - 1 (views where possible)."""
        return EncodedRows(
            categorical=self.categorical[first:last],
            bags=tuple(bags.slice(first, last) for bags in self.bags),
            numeric=self.numeric[first:last],
            keys=None if self.keys is None else self.keys[first:last],
            share=None if self.share is None else self.share[first:last],
        )

    @staticmethod
    def joined(parts: Sequence[EncodedRows]) -> EncodedRows:
        """Returns the examples of all parts, one part after another (copied)."""
        keys = [part.keys for part in parts if part.keys is not None]
        shares = [part.share for part in parts if part.share is not None]
        return EncodedRows(
            categorical=np.concatenate([part.categorical for part in parts]),
            bags=tuple(map(Bags.joined, zip(*(part.bags for part in parts), strict=True))),
            numeric=np.concatenate([part.numeric for part in parts]),
            keys=np.concatenate(keys) if keys else None,
            share=np.concatenate(shares) if shares else None,
        )
