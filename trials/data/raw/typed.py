"""Typed batches, made from raw ones, which every later step reads.

A typed batch is an Arrow record batch under the log's own column names; by role:

    label        uint8, 0 or 1; a share of clicks has a row of each, the second one marked in `labels.PAIR`, and
                 their weights in `PAIR_WEIGHT`
    categorical  dictionary<int32, string> of the batch's own distinct values, null if missing
    split        the same
    multi_hot    list of such, without missing values
    numeric      float64, NaN if missing
    timestamp    int64, milliseconds since 1970, `MISSING_STAMP` if missing
    weight       float32
    oracle       float64
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.log_schema import (
    CategoricalColumn,
    LogSchema,
    MultiHotColumn,
    NumericColumn,
    OracleColumn,
    SplitColumn,
    TimestampColumn,
)
from trials.data.raw.labels import LabelReader
from trials.data.raw.readers import BadRows, RawBatch
from trials.data.raw.stamps import (
    DAY_MS,
    MISSING_STAMP,
    Stamps,
    clocks_of,
    month_numbers,
    stamps_of,
    stamps_of_parts,
)
from trials.data.raw.text import (
    PLAIN_NUMBER,
    as_text,
    coded,
    dictionary_array,
    is_list,
    is_text,
    numbers_of,
)

_WRAPPING = " \t\r\n[](){}'\""
"""Characters trimmed from the values of a bag, so that "['a', 'b']" holds a and b."""
FEW = 0.05
"""Share of a column's time stamps that may be unreadable, which are missing then."""


def typed_columns(
    batch: RawBatch, schema: LogSchema, columns: Sequence[str], bad_rows: BadRows, pool: Executor
) -> dict[str, pa.Array]:
    """Returns the named columns, typed, each in a thread of the pool; all but the label, and those that are read
    for another one alone, such as the time of day beside a date."""
    columns = [name for name in columns if schema.columns[name].role != "ignore"]

    def one(name: str) -> pa.Array:
        return _typed(batch, name, schema, bad_rows)

    typed = dict(zip(columns, pool.map(one, columns), strict=True))
    for name in (name for name in columns if name in schema.numeric and schema.numeric[name].days_before):
        typed[name] = _days_before(typed[name].to_numpy(), typed[str(schema.timestamp)].to_numpy())
    return typed


def type_labelled(
    batch: RawBatch, schema: LogSchema, labels: LabelReader, bad_rows: BadRows, pool: Executor
) -> pa.RecordBatch:
    """Returns all used columns of a batch, typed; where bad rows are skipped, those without label or weight are
    dropped.

    Raises:
        UserError: for values that their role does not allow, with their place (see `BadRows`).
    """
    inputs = [name for name in schema.used if name != schema.label]
    columns = typed_columns(batch, schema, inputs, bad_rows, pool)
    if schema.pairs:
        if schema.weight:
            _without_weight(batch, schema.weight, columns[schema.weight], bad_rows)
        return labels.in_pairs(batch, pa.RecordBatch.from_pydict(columns), schema.weight, bad_rows)
    label, missing, unreadable = labels.read(batch.table.column(schema.label))
    bad_rows.add_unreadable(batch, schema.label, "number", unreadable)
    columns[schema.label] = pa.array(label)
    if schema.weight:
        missing = missing | _without_weight(batch, schema.weight, columns[schema.weight], bad_rows)
    table = pa.RecordBatch.from_pydict({name: columns[name] for name in schema.used if name in columns})
    if not missing.any() or not bad_rows.skip:
        return table
    bad_rows.unlabeled += int(missing.sum())
    return table.filter(pa.array(~missing))


def _without_weight(batch: RawBatch, name: str, weight: pa.Array, bad_rows: BadRows) -> NDArray[np.bool_]:
    values = weight.to_numpy()
    bad: NDArray[np.bool_] = ~(values >= 0)  # NaN too
    if bad.any() and not bad_rows.skip:
        row = int(np.argmax(bad))
        raise UserError(
            f"{batch.where(row)}: the weight {name!r} is {values[row]}; weights are numbers from 0."
        )
    return bad


def _typed(batch: RawBatch, name: str, schema: LogSchema, bad_rows: BadRows) -> pa.Array:
    raw, column = _raw(batch, name, schema), schema.columns[name]
    if isinstance(column, MultiHotColumn):
        return bags_of(raw, column, name)
    if is_list(raw.type) or pa.types.is_nested(raw.type):
        raise UserError(
            f"column {name!r} holds {raw.type}, not one value a row: its role is multi_hot or ignore."
        )
    if isinstance(column, (CategoricalColumn, SplitColumn)):
        return coded(raw, column.marks)
    if isinstance(column, TimestampColumn):
        return pa.array(_stamps(batch, name, schema, column, bad_rows))
    if isinstance(column, NumericColumn) and column.days_before:
        own = TimestampColumn(format=column.days_before, missing=column.missing)
        return pa.array(_stamps(batch, name, schema, own, bad_rows))
    numbers, bad = numbers_of(raw, column if isinstance(column, NumericColumn) else PLAIN_NUMBER)
    if isinstance(column, OracleColumn):
        outside = (numbers < 0.0) | (numbers > 1.0)
        bad_rows.add_unreadable(batch, name, "probability", bad | outside)
        return pa.array(np.where(outside, np.nan, numbers))
    bad_rows.add_unreadable(batch, name, "number", bad)
    return pa.array(numbers.astype(np.float32) if column.role == "weight" else numbers)


def _raw(batch: RawBatch, name: str, schema: LogSchema) -> pa.Array:
    """Returns a column as the file has it; one without a single value may be of any type."""
    raw, column = batch.table.column(name), schema.columns[name]
    if not pa.types.is_null(raw.type):
        return raw
    lists = isinstance(column, MultiHotColumn) and column.separator is None
    return raw.cast(pa.list_(pa.string()) if lists else pa.string())


def _stamps(
    batch: RawBatch, name: str, schema: LogSchema, column: TimestampColumn, bad_rows: BadRows
) -> Stamps:
    """Returns milliseconds (N) of a time stamp; unreadable ones are missing, as long as they are few."""
    raw, table = _raw(batch, name, schema), batch.table
    if column.month and column.day:
        month, day = month_numbers(table.column(column.month)), numbers_of(table.column(column.day))[0]
        stamps, bad = stamps_of_parts(numbers_of(raw)[0], month, day)
    else:
        stamps, bad = stamps_of(raw, column.format, column.marks)
    if column.time:
        clock, unread = clocks_of(table.column(column.time))
        known = (stamps != MISSING_STAMP) & (clock != MISSING_STAMP)
        stamps, bad = np.where(known, stamps + np.where(known, clock, 0), MISSING_STAMP), bad | unread
    bad_rows.add_unreadable(batch, name, f"time stamp in the format {column.format}", bad, most=FEW)
    return stamps


def _days_before(stamps: Stamps, moments: Stamps) -> pa.Array:
    """Returns how many days (N) time stamps lie before the events; NaN if one of the two is missing, or if the
    stamp is a day or more later, which nobody knew at the event."""
    present = (stamps != MISSING_STAMP) & (moments != MISSING_STAMP)
    days = (np.where(present, moments, 0) - np.where(present, stamps, 0)) / DAY_MS
    return pa.array(np.where(present & (days > -1.0), np.maximum(days, 0.0), np.nan))


def bags_of(raw: pa.Array, column: MultiHotColumn, name: str) -> pa.ListArray:
    """Returns bags of values as lists of codes; a missing bag is empty, and missing values are left out of their
    bags."""
    if not is_list(raw.type):
        if column.separator is None or not is_text(raw.type):
            held = "text, and the schema names no separator" if is_text(raw.type) else str(raw.type)
            raise UserError(
                f"column {name!r} holds {held}: a multi_hot column is text with a `separator`, or lists."
            )
        raw = pc.split_pattern(as_text(raw), column.separator)
    lengths = pc.list_value_length(raw).fill_null(0).to_numpy(zero_copy_only=False)
    values = coded(raw.flatten(), column.marks, wrapping=_WRAPPING, weight_mark=column.weight_mark)
    codes = values.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    bag = np.repeat(np.arange(len(raw)), lengths)[codes >= 0]
    bag_sizes = np.bincount(bag, minlength=len(raw))
    offsets = np.concatenate(([0], np.cumsum(bag_sizes))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), dictionary_array(codes[codes >= 0], values.dictionary))
