"""Fits an Encoding on the training rows alone: vocabularies, means, quantiles, what can be missing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.schema import kept_rows
from trials.data.encoding import CYCLE_LENGTH, Encoding, NumericScale, transformed
from trials.data.log_schema import Cycle, LogSchema
from trials.data.prepare.splits import TRAIN, SplitPlan
from trials.data.prepare.staging import Progress, StagedLog
from trials.data.raw.columns import DAY_MS, HOUR_MS, MISSING_STAMP, Stamps, cycle_of
from trials.data.raw.typed import PAIR
from trials.data.vocabulary import Buckets, Hashes, Vocabulary, hash64, quantile_buckets, second_hash

# Running statistics of the training rows: how often values occur, means and deviations, quantiles, time spans.

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


def repeats_of(count_R: NDArray[np.int64]) -> tuple[float, ...]:
    """Returns `Table.repeats` of a table whose rows (R) occur so often; empty if none does."""
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
        """Returns the buckets between the quantiles; None if the values do not vary."""
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
            self._first = min(self._first, int(present.min()))
            self._last = max(self._last, int(present.max()))
            for cycle, occurred in self._seen.items():
                occurred[cycle_of(present, cycle)] = True

    def spans(self, cycle: Cycle) -> bool:
        """Tells whether a table of the cycle can be learnt: the rows pass through all of the cycle, and it
        varies."""
        length_ms = DAY_MS if cycle == "hour_of_day" else 7 * DAY_MS
        resolution_ms = HOUR_MS if cycle == "hour_of_day" else DAY_MS
        return bool(self._last - self._first >= length_ms - resolution_ms and self._seen[cycle].sum() > 1)


# How many values of a growing table share their 64-bit hash with another value, counted in bounded memory.
#
# Values are told apart by a second hash, modulo a prime, so that nothing is kept of them but two numbers. Of at
# most `MOST` values: if there are more, of those whose hashes are in the lower half of all, then in the lower
# quarter, and so on. Two values that share a hash are counted both or neither, so what is found is that of a
# known share.
#
# Shapes: N values, K values that are kept.

MOST = 1 << 17
"""Number of values of a column that are kept: sixteen bytes each, and a few times that while they are sorted. With
more, looking for those that are known takes longer than hashing."""


class HashCollisions:
    """Counts the hashes of a column that stand for several values, batch by batch."""

    def __init__(self, most: int = MOST) -> None:
        """`most`: number of values that are kept."""
        self._most, self._halvings = most, 0
        self._hash_K = self._second_K = np.empty(0, dtype=np.uint64)
        """Both hashes of each value, ascending."""
        self._waiting: list[tuple[Hashes, Hashes]] = []
        """The same of values that may be there already, not in order."""
        self._waiting_values = 0

    def add(self, values: pa.Array) -> None:
        """Takes in values (N) without nulls; those that were there before change nothing."""
        hash_N = hash64(values)
        kept_N = self._kept(hash_N)
        if not kept_N.any():
            return
        hash_N, second_N = hash_N[kept_N], second_hash(values.filter(pa.array(kept_N)))
        if len(self._hash_K):  # leaves out most of what is known, so that it is not sorted again
            place_N = np.minimum(np.searchsorted(self._hash_K, hash_N), len(self._hash_K) - 1)
            new_N = (self._hash_K[place_N] != hash_N) | (self._second_K[place_N] != second_N)
            hash_N, second_N = hash_N[new_N], second_N[new_N]
        self._waiting.append((hash_N, second_N))
        self._waiting_values += len(hash_N)
        if self._waiting_values > self._most // 4:
            self._take_in()

    def _take_in(self) -> None:
        pairs = zip((self._hash_K, self._second_K), *self._waiting, strict=True)
        hash_K, second_K = (np.concatenate(parts) for parts in pairs)
        order = np.lexsort((second_K, hash_K))
        hash_K, second_K = hash_K[order], second_K[order]
        first = np.append(True, (hash_K[1:] != hash_K[:-1]) | (second_K[1:] != second_K[:-1]))
        self._hash_K, self._second_K = hash_K[first[: len(hash_K)]], second_K[first[: len(hash_K)]]
        self._waiting, self._waiting_values = [], 0
        while len(self._hash_K) > self._most:
            self._halvings += 1
            kept = int(self._kept(self._hash_K).sum())  # the first ones
            self._hash_K, self._second_K = self._hash_K[:kept], self._second_K[:kept]

    def _kept(self, hash_N: Hashes) -> NDArray[np.bool_]:
        """Returns which hashes are in the share of all whose values are kept."""
        return hash_N <= np.uint64((1 << (64 - self._halvings)) - 1)

    @property
    def hashes(self) -> int:
        """Number of hashes, of those kept, that stand for several values."""
        self._take_in()
        _, counts = np.unique(self._hash_K, return_counts=True)
        return int((counts > 1).sum())

    @property
    def share(self) -> float:
        """Share of all values that are kept."""
        return 0.5**self._halvings


MAX_VOCABULARY = 5_000_000
"""Number of values that reach `min_count` above which `hash_buckets: auto` hashes."""
AUTO_BUCKETS = 1 << 22
"""Number of buckets of a table that `auto` hashes."""


def fit(
    staged: StagedLog,
    plan: SplitPlan,
    schema: LogSchema,
    pool: Executor,
    progress: Progress,
    collisions: Mapping[str, HashCollisions],
) -> Encoding:
    """Fits an encoding on the training rows of a staged log; `collisions` are told of growing tables' values."""
    counts = {name: ValueCounts() for name in schema.tables}
    moments = {name: Moments(column.transform) for name, column in schema.numeric.items()}
    quantiles = {name: Quantiles(column.buckets) for name, column in schema.numeric.items() if column.buckets}
    span, rows, rows_done = StampRange(), 0, 0
    for file, first_open, batch in staged.batches():
        train = split_of(plan, schema, file, first_open, batch) == TRAIN
        if schema.pairs:  # of two rows that were one, values count once
            train &= batch.column(PAIR).to_numpy() == 0
        rows_done += batch.num_rows
        batch = batch if train.all() else batch.filter(pa.array(train))
        rows += batch.num_rows
        tasks = [pool.submit(each.add, batch.column(name)) for name, each in moments.items()]
        tasks += [pool.submit(sample.add, batch.column(name)) for name, sample in quantiles.items()]
        for name, counted in counts.items():
            values = batch.column(name).flatten() if name in schema.multi_hot else batch.column(name)
            uncounted = isinstance(schema.tables[name].hash_buckets, int) or schema.growing(name)
            tasks.append(pool.submit(counted.add_total if uncounted else counted.add, values))
            if name in collisions:
                tasks.append(pool.submit(collisions[name].add, values.dictionary))
        if schema.timestamp:
            span.add(batch.column(schema.timestamp).to_numpy())
        for task in tasks:
            task.result()
        progress("fitting", rows_done, staged.rows)
    # The encoding, and its schema with nothing left open. A growing table has neither vocabulary nor buckets.
    columns, repeats = dict(schema.columns), dict[str, tuple[float, ...]]()
    vocabularies, scales = dict[str, Vocabulary](), dict[str, NumericScale]()
    for name, column in schema.tables.items():
        buckets = column.hash_buckets if isinstance(column.hash_buckets, int) else None
        if buckets is None and column.table.growing is None:
            table = counts[name].table()
            frequent = pc.sum(pc.greater_equal(table["count"], column.min_count)).as_py() or 0
            if column.hash_buckets == "auto" and frequent > MAX_VOCABULARY:
                buckets = AUTO_BUCKETS
            else:
                vocabularies[name] = vocabulary = Vocabulary.fit(table, column.min_count)
                present = counts[name].total  # missing values and rare ones have a row each
                missing = 0 if name in schema.multi_hot else rows - present
                rare = present - int(vocabulary.counts.sum())
                repeats[name] = repeats_of(np.append(vocabulary.counts, (missing, rare)))
        columns[name] = column.replace(hash_buckets=buckets)
    for name, number in schema.numeric.items():
        bounds = quantiles[name].buckets() if name in quantiles else None
        scales[name] = moments[name].scale().replace(buckets=bounds)
        columns[name] = number.replace(buckets=None if bounds is None else len(bounds))
    if schema.timestamp and schema.event:
        cycles = tuple(cycle for cycle in schema.event.derive if span.spans(cycle))
        columns[schema.timestamp] = schema.event.replace(derive=cycles)
    return Encoding(
        schema=schema.replace(columns=columns),
        vocabularies=vocabularies,
        scales=scales,
        mean_ids={name: counts[name].total / rows for name in schema.multi_hot},
        repeats=repeats,
    )


def split_of(
    plan: SplitPlan, schema: LogSchema, file: str, first_open: int, batch: pa.RecordBatch
) -> NDArray[np.uint8]:
    """Returns the split of each row (N) of a staged batch."""
    stamps = batch.column(schema.timestamp).to_numpy() if schema.timestamp else None
    values = batch.column(schema.split_column) if schema.split_column else None
    splits = plan.of(file, first_open, batch.num_rows, stamps, values)
    if schema.pairs:
        second = np.flatnonzero(batch.column(PAIR).to_numpy())
        splits[second] = splits[second - 1]
    return splits
