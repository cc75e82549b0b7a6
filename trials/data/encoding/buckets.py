"""Buckets of a number: quantiles of the training rows as the values of a categorical column.

A network takes in a standardised number linearly; a row of an embedding table for each bucket lets it learn a step
function of it, as trees have, and lets interaction modules cross it with other columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.values import Value
from trials.data.encoding.vocabulary import FIRST_ID, MISSING_ID

Shares = NDArray[np.float32]


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

    def odd_shares(
        self, values: NDArray[np.float64], scaled: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> Shares:
        """Returns how far each value (N) is from the even towards the odd one of the two beginnings around it.

        The beginning of bucket i is even where i is. Values of the first and of the last bucket, which have one
        end each, count as lying on its beginning, and missing ones as lying on an even one.

        Args:
            values: numbers as the log has them; NaN where missing.
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
