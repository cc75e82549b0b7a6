"""Encoding: what was fitted on the training rows, and how typed columns become a model's inputs.

Ids: 0 is a missing value, 1 one that is out of vocabulary, 2 and above the vocabulary by frequency (or
the hash buckets, the hour or the week day, the quantiles of a number). Values of growing tables have no ids
but keys, 64-bit hashes, 0 if missing. Numbers: standardised, 0 if missing, with a 0/1 input
`<column>__missing` besides if training rows had missing values. An exported model carries its encoding.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from dhen.errors import UserError
from dhen.schema import FeatureSchema, Table
from dhen.values import PathBelow, Value, fingerprint, load_json, parse
from trials.data.log_schema import LogSchema
from trials.data.raw.columns import Codes, codes_of, cycle_of
from trials.data.raw.readers import BadRows, RawBatch, read_batches
from trials.data.raw.sources import open_log
from trials.data.raw.typed import typed_columns
from trials.data.read_options import READ_AS_FOUND, ReadOptions
from trials.data.schema_yaml import read_schema, schema_to_yaml
from trials.data.vocabulary import (
    FIRST_ID,
    MISSING_ID,
    MISSING_KEY,
    UNKNOWN_ID,
    Buckets,
    Vocabulary,
    hash64,
    hashed_ids,
)

# Encoded rows: the inputs of a model for N examples, as arrays (torch-free twin of `FeatureBatch`).


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """The ids of N examples in one multi-hot table: those of example i are `ids[offsets[i] : offsets[i + 1]]`."""

    ids: NDArray[np.int32] | NDArray[np.int64]
    """Ids, or, of a growing table, keys: 64-bit hashes of the values, 0 if missing."""
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
    """64-bit hashes of the values (N x G) of growing categorical tables, 0 if missing; None if there are
    none."""
    share: NDArray[np.float32] | None = None
    """How far each number with buckets is from the even towards the odd one of its nodes (a column for each); None
    if there are no buckets."""

    @property
    def rows(self) -> int:
        """Number of examples, N."""
        return len(self.numeric)

    def take(self, rows: NDArray[np.int64]) -> EncodedRows:
        """Returns the given examples, in the order given (copied)."""
        bags = tuple(bags.take(rows) for bags in self.bags)
        return self._each(lambda array: np.take(array, rows, axis=0), bags)

    def slice(self, first: int, last: int) -> EncodedRows:
        """Returns examples first to last - 1 (views if possible)."""
        bags = tuple(bags.slice(first, last) for bags in self.bags)
        return self._each(lambda array: array[first:last], bags)

    def _each(self, rows_of: Callable[[NDArray[Any]], NDArray[Any]], bags: tuple[Bags, ...]) -> EncodedRows:
        return EncodedRows(
            categorical=rows_of(self.categorical),
            bags=bags,
            numeric=rows_of(self.numeric),
            keys=None if self.keys is None else rows_of(self.keys),
            share=None if self.share is None else rows_of(self.share),
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


Id = TypeVar("Id", np.int32, np.int64)
CYCLE_LENGTH = {"hour_of_day": 24, "day_of_week": 7}
CLIP = 100.0
"""Number of deviations within which standardised numbers are kept: no single outlier must end a training."""


class NumericScale(Value):
    """The standardisation of one numeric column, and the buckets of its table."""

    transform: str
    mean: float
    """Mean of the transformed training values."""
    std: float = Field(gt=0)
    """Deviation of the transformed training values; 1 if they do not vary."""
    indicator: bool
    """Whether there is an input that says the value is missing."""
    buckets: Buckets | None = None
    """Buckets of the column's table; None if it has none."""

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns standardised values (N), 0 if missing."""
        z = (self.transformed(values) - self.mean) / self.std
        return np.clip(np.nan_to_num(z, nan=0.0), -CLIP, CLIP).astype(np.float32)

    def transformed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns values (N) before standardisation."""
        return transformed(values, self.transform)

    def undo(self, z: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the values (N) as the log has them, from standardised ones."""
        values = z.astype(np.float64) * self.std + self.mean
        return np.sign(values) * np.expm1(np.abs(values)) if self.transform == "log" else values


class _Tables(Value):
    """The content of tables.json."""

    vocabularies: dict[str, PathBelow]
    """File names of vocabularies, by column."""
    mean_ids: dict[str, float]
    """Mean number of ids per example, by multi-hot column."""
    repeats: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """What `Table.repeats` is, by column whose values were counted; logs of before it was kept have none."""


def transformed(values: NDArray[np.float64], transform: str) -> NDArray[np.float64]:
    """Returns values (N) before standardisation: as they are, or sign(x) log(1 + |x|)."""
    return np.sign(values) * np.log1p(np.abs(values)) if transform == "log" else values


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoding:
    """A fitted schema. Equal fingerprints encode equal rows alike."""

    schema: LogSchema
    """The schema, with every `hash_buckets` resolved to a number or None, and only the derived tables kept."""
    vocabularies: Mapping[str, Vocabulary]
    """Vocabularies by column, of tables that are not hashed."""
    scales: Mapping[str, NumericScale]
    """Scales by numeric column; with buckets if the schema has them."""
    mean_ids: Mapping[str, float]
    """Mean number of ids per example, by multi-hot column."""
    repeats: Mapping[str, tuple[float, ...]]
    """What `Table.repeats` is, by column whose values were counted."""

    @cached_property
    def features(self) -> FeatureSchema:
        """The inputs of a model, in the order in which rows are encoded."""

        def table(name: str, **of_bags: Any) -> Table:
            growing, buckets = self.schema.growing(name), self.schema.tables[name].hash_buckets
            if growing is not None:
                rows = 1 + growing.capacity
            else:
                rows = FIRST_ID + (buckets if isinstance(buckets, int) else len(self.vocabularies[name]))
            repeats = self.repeats.get(name, ())
            return Table(name=name, rows=rows, growing=growing, repeats=repeats, **of_bags)

        buckets = self._buckets.items()
        tables = (
            *map(table, self.schema.categorical),
            *(Table(name=cycle, rows=FIRST_ID + CYCLE_LENGTH[cycle]) for cycle in self.schema.cycles),
            *(Table(name=name, rows=FIRST_ID + len(each), buckets=True) for name, each in buckets),
            *(table(name, multi_hot=True, mean_ids=self.mean_ids[name]) for name in self.schema.multi_hot),
        )
        return FeatureSchema(tables=tables, numeric=(*self.scales, *self._indicators.values()))

    def value_names(self, table: str, ids: Iterable[int]) -> list[str]:
        """Returns what ids of a categorical table stand for, to be read: values, hours, days, ranges or buckets.

        Keys of a growing table, which keeps no values, are named as hashes.
        """
        if table in self.schema.categorical and self.schema.growing(table):
            missing = (0, MISSING_KEY)
            return ["(missing)" if key in missing else f"hash {key & (2**64 - 1):016x}" for key in ids]
        shared = {MISSING_ID: "(missing)", UNKNOWN_ID: "(not in training)"}
        vocabulary = self.vocabularies.get(table)
        word = "" if table in CYCLE_LENGTH else "bucket "

        def name(index: int) -> str:
            if table in self._buckets:
                return self._buckets[table].name(index)
            return vocabulary.name(index) if vocabulary is not None else f"{word}{index}"

        return [shared.get(row) or name(row - FIRST_ID) for row in ids]

    def numbers(self, name: str, numeric_NK: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns a numeric column of encoded rows as the log has it (N), NaN if it is known to be missing."""
        inputs = self.features.numeric
        values = self.scales[name].undo(numeric_NK[:, inputs.index(name)])
        if name in self._indicators:
            values[numeric_NK[:, inputs.index(self._indicators[name])] > 0.5] = np.nan
        return values

    def with_tables(self, schema: LogSchema, vocabularies: Mapping[str, Vocabulary]) -> Encoding:
        """Returns an encoding that differs in kinds of tables: those of a schema, with these vocabularies."""
        as_before = {
            name: shares
            for name, shares in self.repeats.items()
            if self.schema.growing(name) is None and schema.growing(name) is None
        }
        return replace(self, schema=schema, vocabularies=vocabularies, repeats=as_before)

    @property
    def _indicators(self) -> dict[str, str]:
        return {name: f"{name}__missing" for name, scale in self.scales.items() if scale.indicator}

    @cached_property
    def _buckets(self) -> dict[str, Buckets]:
        """The buckets by the table's name."""
        by_table = {table: self.scales[name].buckets for table, name in self.schema.bucketed.items()}
        return {table: buckets for table, buckets in by_table.items() if buckets is not None}

    @cached_property
    def fingerprint(self) -> str:
        """A hash (16 hex digits) of all that decides how a row is encoded."""
        vocabularies = {name: vocabulary.checksum() for name, vocabulary in self.vocabularies.items()}
        scales = {name: scale.to_dict() for name, scale in self.scales.items()}
        return fingerprint([self.schema.of_rows(), vocabularies, scales])

    def encode(self, columns: Mapping[str, pa.Array], pool: Executor) -> EncodedRows:
        """Encodes typed columns (see `trials.data.raw.typed`) of N rows; columns that are no input are not looked
        at."""
        growing = [name for name in self.schema.categorical if self.schema.growing(name)]
        hashed = pool.map(lambda name: self._keys(name, columns[name]), growing)
        categorical = pool.map(lambda name: self._ids(name, columns[name]), self.schema.categorical)
        bags = pool.map(lambda name: self._bags(name, columns[name]), self.schema.multi_hot)
        numbers = {name: columns[name].to_numpy() for name in self.scales}
        scaled = pool.map(lambda name: self.scales[name].apply(numbers[name]), self.scales)
        missing = (np.isnan(numbers[name]) for name in self._indicators)
        of_number = [self.schema.bucketed[table] for table in self._buckets]
        bucketed = pool.map(
            lambda name, buckets: buckets.ids(numbers[name]), of_number, self._buckets.values()
        )
        shares = pool.map(
            lambda name, buckets: buckets.odd_shares(numbers[name], self.scales[name].transformed),
            *(of_number, self._buckets.values()),
        )
        rows = len(next(iter(columns.values())))
        cycles = []
        for cycle in self.schema.cycles:
            value = cycle_of(columns[str(self.schema.timestamp)].to_numpy(), cycle)
            cycles.append(np.where(value < 0, MISSING_ID, value + FIRST_ID))

        def matrix(dtype: type[np.generic], *columns: NDArray[Any]) -> NDArray[Any]:
            filled = np.empty((rows, len(columns)), dtype)
            for place, column in enumerate(columns):
                filled[:, place] = column
            return filled

        return EncodedRows(
            categorical=matrix(np.int32, *categorical, *cycles, *bucketed),
            bags=tuple(bags),
            numeric=matrix(np.float32, *scaled, *missing),
            keys=matrix(np.int64, *hashed) if growing else None,
            share=matrix(np.float32, *shares) if of_number else None,
        )

    def _ids(self, name: str, column: pa.DictionaryArray) -> Codes:
        if self.schema.growing(name):
            return np.zeros(len(column), dtype=np.int32)
        buckets, values = self.schema.tables[name].hash_buckets, column.dictionary
        if isinstance(buckets, int):
            return _of_rows(column, hashed_ids(values, buckets), np.int32(MISSING_ID))
        return _of_rows(column, self.vocabularies[name].ids(values), np.int32(MISSING_ID))

    def _bags(self, name: str, column: pa.ListArray) -> Bags:
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
        ids = self._keys(name, values) if self.schema.growing(name) else self._ids(name, values)
        return Bags(ids=ids, offsets=offsets - offsets[0])

    def _keys(self, name: str, column: pa.DictionaryArray) -> NDArray[np.int64]:
        """Returns 64-bit hashes of values (N); if they are missing 0, or the key that has a row for them."""
        growing = self.schema.growing(name)
        assert growing is not None
        missing = np.int64(MISSING_KEY if growing.missing == "own" else 0)
        return _of_rows(column, hash64(column.dictionary).view(np.int64), missing)

    def save(self, directory: Path) -> None:
        """Writes schema.yaml, tables.json, numeric.json and vocabulary/*.parquet into a directory."""
        (directory / "vocabulary").mkdir(parents=True, exist_ok=True)
        (directory / "schema.yaml").write_text(schema_to_yaml(self.schema), encoding="utf-8")
        files = {}
        for number, (name, vocabulary) in enumerate(self.vocabularies.items()):
            # a file name that is safe on every file system, and still readable
            files[name] = f"{number:03d}_{re.sub(r'[^A-Za-z0-9-]+', '_', name)[:40]}.parquet"
            vocabulary.save(directory / "vocabulary" / files[name])
        tables = _Tables(vocabularies=files, mean_ids=dict(self.mean_ids), repeats=dict(self.repeats))
        scales = {name: scale.to_dict() for name, scale in self.scales.items()}
        for file, data in (("numeric.json", scales), ("tables.json", tables.to_dict())):
            text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
            (directory / file).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Encoding:
        """Reads what `save` wrote.

        Raises:
            UserError: when a part is missing or damaged.
        """
        tables = parse(_Tables, load_json(directory / "tables.json"), f"{directory}/tables.json")
        scales = load_json(directory / "numeric.json")
        if not isinstance(scales, dict):
            raise UserError(
                f"{directory}/numeric.json: expected a mapping, received {type(scales).__name__}."
            )
        return cls(
            schema=read_schema(directory / "schema.yaml"),
            vocabularies={
                name: Vocabulary.load(directory / "vocabulary" / file)
                for name, file in tables.vocabularies.items()
            },
            scales={
                name: parse(NumericScale, data, f"{directory}/numeric.json") for name, data in scales.items()
            },
            mean_ids=tables.mean_ids,
            repeats=tables.repeats,
        )


def _of_rows(column: pa.DictionaryArray, of_values: NDArray[Id], missing: Id) -> NDArray[Id]:
    """Returns for each row (N) what its value has, given for each value of the dictionary."""
    found: NDArray[Id] = np.append(of_values, missing)[codes_of(column)]
    return found


# The short way from raw files straight to a model's inputs, for scoring. Needs no label and no cache.


T = TypeVar("T")


def encode_rows(
    sources: Sequence[Path],
    encoding: Encoding,
    *,
    options: ReadOptions = READ_AS_FOUND,
    batch_size: int = 65_536,
) -> Iterator[EncodedRows]:
    """Encodes the rows of raw files, in their order, at most `batch_size` at a time.

    Columns that are no input are ignored. No row is ever left out, so that scores keep their row's number.

    Raises:
        UserError: when the files lack an input column (all are listed), or for a row that cannot be read.
    """
    log = open_log(sources, options.format, options.csv, encoding.schema.csv)
    inputs = encoding.schema.inputs
    absent = [name for name in inputs if name not in log.columns]
    if absent:
        raise UserError(
            f"{log.describe()}: the columns {', '.join(map(repr, absent))} are missing, which the model "
            f"needs; the log has {', '.join(log.columns)}."
        )

    def encoded() -> Iterator[EncodedRows]:  # the files are checked at once, and read when rows are asked for
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for batch in read_batches(log, inputs, BadRows(skip=False), encoding.schema.marks):
                rows = _encode(batch, encoding, pool)
                for start in range(0, rows.rows, batch_size):
                    yield rows.slice(start, min(start + batch_size, rows.rows))

    return encoded()


def transform(table: pa.RecordBatch, encoding: Encoding) -> EncodedRows:
    """Encodes a batch of raw columns, text or typed.

    Raises:
        UserError: when an input column is missing, or for a value that its role does not allow.
    """
    absent = [name for name in encoding.schema.inputs if name not in table.schema.names]
    if absent:
        raise UserError(f"the columns {', '.join(map(repr, absent))} are missing, which the model needs.")
    return _encode(RawBatch(table=table), encoding, _InThisThread())


class _InThisThread(Executor):
    """What is submitted runs at once: handing a request's columns to another thread takes longer than they do."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _encode(batch: RawBatch, encoding: Encoding, pool: Executor) -> EncodedRows:
    columns = typed_columns(batch, encoding.schema, encoding.schema.inputs, BadRows(skip=False), pool)
    return encoding.encode(columns, pool)
