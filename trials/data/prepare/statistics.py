"""Running statistics of the training rows: how often values occur, means and deviations, quantiles, time spans."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dhen.schema import kept_rows
from trials.data.encoding.buckets import Buckets, quantile_buckets
from trials.data.encoding.encoding import CYCLE_LENGTH, NumericScale, transformed
from trials.data.log_schema import Cycle
from trials.data.raw.stamps import DAY_MS, HOUR_MS, MISSING_STAMP, Stamps, cycle_of

COMPACT_AT = 1 << 16
"""Number of counted values that may wait before equal ones are added up."""
SAMPLE = 1 << 17
"""Number of values of a numeric column from which its quantiles are taken: of 256 buckets, each has its share to 5
%."""


class ValueCounts:
    """The counts of the values of a table; memory is bounded by the distinct values."""

    def __init__(self) -> None:
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._compact_above = COMPACT_AT
        self.total = 0
        """Number of all values."""

    def add(self, column: pa.DictionaryArray) -> None:
        """Counts more values; nulls do not count."""
        codes = column.indices.drop_null().to_numpy(zero_copy_only=False)
        counts = np.bincount(codes, minlength=len(column.dictionary)).astype(np.int64)
        occurring = pa.array(counts > 0)
        self._waiting.append(
            pa.table({"value": column.dictionary.filter(occurring), "count": counts[counts > 0]})
        )
        self._waiting_rows += len(self._waiting[-1])
        self.add_total(column)
        if self._waiting_rows > self._compact_above:
            self._waiting = [self.table()]
            self._waiting_rows = len(self._waiting[0])
            self._compact_above = COMPACT_AT + 2 * self._waiting_rows

    def add_total(self, column: pa.DictionaryArray) -> None:
        """Adds so many values to the total, whatever they are."""
        self.total += len(column) - column.null_count

    def table(self) -> pa.Table:
        """Returns distinct `value`s with their `count`s."""
        if not self._waiting:
            return pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
        summed = pa.concat_tables(self._waiting).group_by("value").aggregate([("count", "sum")])
        return summed.rename_columns({"count_sum": "count"}).select(["value", "count"])


def repeats(count_R: NDArray[np.int64]) -> tuple[float, ...]:
    """Returns `Table.repeats` of a table whose rows (R) occur so often; empty where none does."""
    descending = np.sort(count_R)[::-1]
    if not len(descending) or not descending[0]:
        return ()
    found = np.cumsum(np.maximum(descending - 1, 0))
    return tuple(round(float(found[rows - 1] / descending.sum()), 4) for rows in kept_rows(len(descending)))


class Moments:
    """Mean and deviation of a numeric column, batch by batch (Chan et al. 1979), and how many are missing."""

    def __init__(self, transform: str) -> None:
        self._transform = transform
        self._n = self._mean = self._m2 = 0.0
        self._missing = 0

    def add(self, column: pa.Array) -> None:
        """Takes in more values."""
        values = column.to_numpy()
        present = transformed(values[~np.isnan(values)], self._transform)
        self._missing += len(values) - len(present)
        if not len(present):
            return
        mean, n = float(present.mean()), self._n + len(present)
        delta = mean - self._mean
        self._m2 += float(np.square(present - mean).sum()) + delta * delta * self._n * len(present) / n
        self._mean += delta * len(present) / n
        self._n = n

    def scale(self) -> NumericScale:
        """Returns how to standardise the column."""
        std = float(np.sqrt(self._m2 / self._n)) if self._n else 0.0
        varies = std > 1e-9 * max(1.0, abs(self._mean))
        return NumericScale(
            transform=self._transform,
            mean=self._mean,
            std=std if varies else 1.0,
            indicator=self._missing > 0,
        )


class Quantiles:
    """A uniform sample of a numeric column, batch by batch: the values that drew the least random numbers.

    The draws follow the rows, hence equal rows give equal samples, however they are batched.
    """

    def __init__(self, most: int) -> None:
        """Takes the largest number of buckets."""
        self._most = most
        self._random = np.random.default_rng(0)
        self._drawn = np.empty((2, 0))
        """Random draws, and the values that they belong to."""
        self._bound = 1.0
        """Draw from which on a draw is none of the least."""

    def add(self, column: pa.Array) -> None:
        """Takes in more values."""
        values = column.to_numpy()
        present = values[~np.isnan(values)]
        drawn = np.stack([self._random.random(len(present)), present])
        self._drawn = np.concatenate([self._drawn, drawn[:, drawn[0] < self._bound]], axis=1)
        if self._drawn.shape[1] > 1.5 * SAMPLE:
            self._keep_least()

    def buckets(self) -> Buckets | None:
        """Returns the buckets between the quantiles; None where the values do not vary."""
        if self._drawn.shape[1] > SAMPLE:
            self._keep_least()
        buckets = quantile_buckets(self._drawn[1], self._most)
        return buckets if len(buckets) > 1 else None

    def _keep_least(self) -> None:
        self._drawn = self._drawn[:, np.argpartition(self._drawn[0], SAMPLE)[:SAMPLE]]
        self._bound = float(self._drawn[0].max())


class StampRange:
    """The hours and days that the training rows span."""

    def __init__(self) -> None:
        self._first, self._last = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self._seen = {cycle: np.zeros(length, dtype=bool) for cycle, length in CYCLE_LENGTH.items()}

    def add(self, stamps: Stamps) -> None:
        """Takes in more rows."""
        present = stamps[stamps != MISSING_STAMP]
        if len(present):
            self._first, self._last = (
                min(self._first, int(present.min())),
                max(self._last, int(present.max())),
            )
            for cycle, occurred in self._seen.items():
                occurred[cycle_of(present, cycle)] = True

    def spans(self, cycle: Cycle) -> bool:
        """Tells whether a table of the cycle can be learnt: the rows pass through all of the cycle, and it
        varies."""
        length_ms = DAY_MS if cycle == "hour_of_day" else 7 * DAY_MS
        resolution_ms = HOUR_MS if cycle == "hour_of_day" else DAY_MS
        return bool(self._last - self._first >= length_ms - resolution_ms and self._seen[cycle].sum() > 1)
