"""Buckets of a number: quantiles of the training rows as the values of a categorical column.

A network takes in a standardised number linearly; a row of an embedding table for each bucket lets it learn a step
function of it, as trees have, and lets interaction modules cross it with other columns.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from dhen.values import Value
from trials.data.encoding.vocabulary import FIRST_ID, MISSING_ID


class Buckets(Value):
    """The boundaries of the buckets of a numeric column."""

    begins: tuple[float, ...]
    """Beginnings of all buckets but the first, ascending; the first bucket has all smaller values."""

    def __len__(self) -> int:
        return len(self.begins) + 1

    def ids(self, values: NDArray[np.float64]) -> NDArray[np.int32]:
        """Returns the id of each value's bucket (N), that of a missing value where it is NaN."""
        positions = np.searchsorted(self.begins, values, side="right")
        return np.where(np.isnan(values), MISSING_ID, positions + FIRST_ID).astype(np.int32)

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
        most: number of buckets there may be; there are fewer where values are equal.
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
