"""Fits an Encoding on the training rows alone: vocabularies, means, quantiles, what can be missing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.encoding.encoding import Encoding, NumericScale
from trials.data.encoding.vocabulary import Vocabulary
from trials.data.log_schema import LogSchema, TableColumn, TimestampColumn
from trials.data.prepare.collisions import HashCollisions
from trials.data.prepare.splits import TRAIN, SplitPlan
from trials.data.prepare.staging import Progress, Staged
from trials.data.prepare.statistics import Moments, Quantiles, StampRange, ValueCounts, repeats
from trials.data.raw.labels import PAIR

MAX_VOCABULARY = 5_000_000
"""Number of values that reach `min_count` above which `hash_buckets: auto` hashes."""
AUTO_BUCKETS = 1 << 22
"""Number of buckets of a table that `auto` hashes."""


def fit(
    staged: Staged,
    plan: SplitPlan,
    schema: LogSchema,
    pool: Executor,
    progress: Progress,
    collisions: Mapping[str, HashCollisions],
) -> Encoding:
    """Fits an encoding on the training rows of a staged log; `collisions` are told of growing tables' values."""
    fitting = _Fitting(schema, collisions)
    rows_done = 0
    for file, first_open, batch in staged.batches():
        train = split_of(plan, schema, file, first_open, batch) == TRAIN
        if schema.pairs:  # of two rows that were one, values count once
            train &= batch.column(PAIR).to_numpy() == 0
        fitting.add(batch if train.all() else batch.filter(pa.array(train)), pool)
        rows_done += batch.num_rows
        progress("fitting", rows_done, staged.rows)
    return fitting.encoding()


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


class _Fitting:
    """The statistics of all columns, from which an encoding is fitted."""

    def __init__(self, schema: LogSchema, collisions: Mapping[str, HashCollisions]) -> None:
        self._schema, self._collisions = schema, collisions
        self._rows = 0
        self._counts = {name: ValueCounts() for name in schema.tables}
        self._moments = {name: Moments(column.transform) for name, column in schema.numeric.items()}
        self._quantiles = {
            name: Quantiles(column.buckets) for name, column in schema.numeric.items() if column.buckets
        }
        self._span = StampRange()

    def add(self, batch: pa.RecordBatch, pool: Executor) -> None:
        """Takes in typed training rows, each column in a thread of the pool."""
        tasks = [pool.submit(moments.add, batch.column(name)) for name, moments in self._moments.items()]
        tasks += [pool.submit(sample.add, batch.column(name)) for name, sample in self._quantiles.items()]
        for name, counts in self._counts.items():
            column = batch.column(name)
            values = column.flatten() if name in self._schema.multi_hot else column
            hashed = isinstance(self._schema.tables[name].hash_buckets, int)
            uncounted = hashed or self._schema.growing(name)
            tasks.append(pool.submit(counts.add_total if uncounted else counts.add, values))
            if name in self._collisions:
                tasks.append(pool.submit(self._collisions[name].add, values.dictionary))
        if self._schema.timestamp:
            self._span.add(batch.column(self._schema.timestamp).to_numpy())
        self._rows += batch.num_rows
        for task in tasks:
            task.result()

    def encoding(self) -> Encoding:
        """Returns the encoding that follows from the statistics."""
        tables = {
            name: _table(column, self._counts[name])
            for name, column in self._schema.tables.items()
            if column.table.growing is None
        }
        scales = {name: self._scale(name) for name in self._moments}
        return Encoding(
            schema=_resolved(self._schema, tables, scales, self._span),
            vocabularies={name: table for name, table in tables.items() if isinstance(table, Vocabulary)},
            scales=scales,
            mean_ids={name: self._counts[name].total / self._rows for name in self._schema.multi_hot},
            repeats={
                name: self._repeats(name, table)
                for name, table in tables.items()
                if isinstance(table, Vocabulary)
            },
        )

    def _repeats(self, name: str, vocabulary: Vocabulary) -> tuple[float, ...]:
        """Returns `Table.repeats` of a column; missing values and rare ones have a row each."""
        present = self._counts[name].total
        missing = 0 if name in self._schema.multi_hot else self._rows - present
        rare = present - int(vocabulary.counts.sum())
        return repeats(np.append(vocabulary.counts, (missing, rare)))

    def _scale(self, name: str) -> NumericScale:
        """Returns the scale of a numeric column; with buckets where they were asked for and the column varies."""
        scale, quantiles = self._moments[name].scale(), self._quantiles.get(name)
        return scale.replace(buckets=quantiles.buckets()) if quantiles else scale


def _table(column: TableColumn, counts: ValueCounts) -> Vocabulary | int:
    """Returns a vocabulary, or the number of buckets of a table that is hashed."""
    if isinstance(column.hash_buckets, int):
        return column.hash_buckets
    counted = counts.table()
    frequent = pc.sum(pc.greater_equal(counted["count"], column.min_count)).as_py() or 0
    if column.hash_buckets == "auto" and frequent > MAX_VOCABULARY:
        return AUTO_BUCKETS
    return Vocabulary.fit(counted, column.min_count)


def _resolved(
    schema: LogSchema,
    tables: Mapping[str, Vocabulary | int],
    scales: Mapping[str, NumericScale],
    span: StampRange,
) -> LogSchema:
    """Returns the schema with nothing left open."""
    columns = dict(schema.columns)
    for name in schema.tables:  # a growing one has neither vocabulary nor buckets
        table = tables.get(name)
        hashed = table if isinstance(table, int) else None
        columns[name] = schema.tables[name].replace(hash_buckets=hashed)
    for name, scale in scales.items():
        buckets = len(scale.buckets) if scale.buckets is not None else None
        columns[name] = schema.numeric[name].replace(buckets=buckets)
    if schema.timestamp:
        column = columns[schema.timestamp]
        assert isinstance(column, TimestampColumn)
        cycles = tuple(cycle for cycle in column.derive if span.spans(cycle))
        columns[schema.timestamp] = column.replace(derive=cycles)
    return schema.replace(columns=columns)
