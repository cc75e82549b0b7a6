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

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.errors import UserError, listed, unknown_name
from dhen.values import parse
from trials.data.log_schema import (
    COMPARISON,
    PAIR_WEIGHT,
    CategoricalColumn,
    LabelColumn,
    LogSchema,
    MultiHotColumn,
    NumericColumn,
    OracleColumn,
    SplitColumn,
    TimestampColumn,
)
from trials.data.raw.columns import (
    DAY_MS,
    MISSING_STAMP,
    PLAIN_NUMBER,
    Stamps,
    as_text,
    clocks_of,
    coded,
    codes_of,
    dictionary_array,
    is_list,
    is_text,
    month_numbers,
    numbers_of,
    stamps_of,
    stamps_of_parts,
)
from trials.data.raw.readers import BadRows, RawBatch

# Labels as 0 and 1: two values, whatever they are called, or a comparison.
#
# A share of clicks makes two rows of each, so that nothing that comes later meets another label.

PAIR = "\0pair"
"""Column of typed batches that marks the second of two rows that were one; no file has such a name."""
WAYS = (
    "A label is a column of two values; a comparison, label='rating>=4' or label=status==delivered; clicks among "
    "impressions, label=clicks/impressions; or a rate, label=ctr weight=impressions"
)
_OPERATORS = re.compile(r">=|<=|!=|==|[<>=/]")
_ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}

_NEGATIVE = {"0", "-1", "false", "f", "no", "n", "noclick", "no_click", "no click", "not_clicked", "negative"}
_POSITIVE = {"1", "true", "t", "yes", "y", "click", "clicked", "positive"}
LISTED = 10
"""Number of values that an error message shows at most."""


def canonical(value: str) -> str:
    """Returns one spelling for "1", "1.0" and "+1", and for "Yes" and "yes"."""
    try:
        number = float(value)
    except ValueError:
        return value.strip().lower()
    return str(int(number)) if number.is_integer() else str(number)


def plain_label(value: str) -> int | None:
    """Returns 0 or 1 if the value says so itself."""
    value = canonical(value)
    return 1 if value in _POSITIVE else 0 if value in _NEGATIVE else None


def label_of(text: str, columns: Collection[str]) -> tuple[str, LabelColumn, str | None]:
    """Returns the label column that a text names, its rule, and its column of impressions, if it names one.

    A column of exactly this name goes before a comparison (`rating>=4`) or a share (`clicks/impressions`).

    Raises:
        UserError: for a column that is not there, or a comparison of no number; it lists the ways.
    """
    if text in columns:
        return text, LabelColumn(), None
    unknown = _OPERATORS.split(text)[0].strip()
    for sign in _OPERATORS.finditer(text):
        name, value = text[: sign.start()].strip(), text[sign.end() :].strip()
        if name not in columns:
            continue
        if sign[0] == "/" and value in columns:
            return name, LabelColumn(share="count"), value
        if sign[0] != "/":
            rule = ("==" if sign[0] == "=" else sign[0]) + value
            return name, parse(LabelColumn, {"where": rule}, f"label={text}"), None
        unknown = value
    raise UserError(f"{unknown_name('label column', unknown, columns)} {WAYS}.")


def rates_of(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns a column's rates (N), of which `3.4%` is 0.034, and which were unreadable (N); see `numbers_of`."""
    rate_N, unreadable_N = numbers_of(column, NumericColumn(suffix="%"))
    percent = pc.match_substring_regex(as_text(column), r"%\s*$").fill_null(False)
    return np.where(percent.to_numpy(zero_copy_only=False), rate_N / 100, rate_N), unreadable_N


class LabelReader:
    """Reads the label column batch by batch, and knows at the end whether it was a label column."""

    def __init__(self, column: str, rule: LabelColumn, where: str) -> None:
        self._column = column
        self._rule = rule
        self._positive = None if rule.positive is None else canonical(rule.positive)
        self._where = where
        self.counts: Counter[str] = Counter()
        """Number of rows by canonical value."""
        self.missing = 0

    def read(self, column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns labels (N), which are missing (N; their label is 0), and which are no number, but compared with
        one.

        Raises:
            UserError: when more than two values were seen, or values of which none is known to be positive, and
                for lists.
        """
        if pa.types.is_nested(column.type):
            raise self._error(f"{column.type}, not one value a row", "A label has exactly two values")
        unreadable = np.zeros(len(column), dtype=bool)
        if self._rule.where is not None:
            column, unreadable = _compared(column, self._rule.where)
        encoded = coded(column)
        codes = codes_of(encoded)
        values = encoded.dictionary.to_pylist()
        missing = codes < 0
        self.missing += int(missing.sum())
        rows = np.bincount(codes[~missing], minlength=len(values))
        for value, count in zip(values, rows.tolist(), strict=True):
            if count:  # a categorical column has a category also if no row is of it any more
                self.counts[canonical(value)] += count
        if len(self.counts) > 2:
            name = self._column
            raise self._error(
                f"more than two values: {_listed(self.counts)}",
                f"A label has exactly two values: say which are clicks, label='{name}>=4', that it counts them, "
                f"label={name}/impressions, or that it is a rate from 0 to 1, label={name} weight=impressions (or "
                "without a weight, if it is a probability)",
            )
        found = [self._label(value) if count else 0 for value, count in zip(values, rows, strict=True)]
        labels = np.array([*found, 0], dtype=np.uint8)
        return labels[codes], missing, unreadable

    def in_pairs(
        self, batch: RawBatch, table: pa.RecordBatch, weight: str | None, bad_rows: BadRows
    ) -> pa.RecordBatch:
        """Returns the rows of a typed table as two each, with label 1 and label 0 and their parts of the weight; a
        part without weight is left out.

        Raises:
            UserError: for a rate that is not between 0 and 1, or a number of clicks that is not between 0 and that
                of impressions, with its place.
        """
        counts = self._rule.share == "count"
        value_N, unreadable_N = (numbers_of if counts else rates_of)(batch.table.column(self._column))
        bad_rows.add_unreadable(batch, self._column, "number", unreadable_N)
        # of the raw column: what is typed is float32, which rounds large counts
        weight_N = numbers_of(batch.table.column(weight))[0] if weight else np.ones(len(value_N))
        missing_N = np.isnan(value_N)
        outside_N = ~missing_N & ~((value_N >= 0) & (value_N <= (weight_N if counts else 1)))
        if outside_N.any() and not bad_rows.skip:
            row = int(np.argmax(outside_N))
            most = f"from 0 to {weight!r}, which is {weight_N[row]:g}" if counts else "a rate from 0 to 1"
            raise UserError(
                f"{batch.where(row)}: the label {self._column!r} is {value_N[row]:g}; expected {most}. Mend the "
                "row, or leave such rows out with skip_bad_rows, if the command takes it."
            )
        self.missing += int(missing_N.sum())
        left_out_N = missing_N | outside_N | ~(weight_N >= 0)
        bad_rows.unlabeled += int(left_out_N.sum()) if bad_rows.skip else 0
        bad_rows.weightless += int((weight_N[~left_out_N] == 0).sum())
        clicks_N = value_N if counts else value_N * weight_N
        parts_NL = np.stack([clicks_N, weight_N - clicks_N], axis=1).astype(np.float32)
        parts_NL[left_out_N] = 0
        rows, part = np.nonzero(parts_NL)
        self.counts.update({"1": int((part == 0).sum()), "0": int(part.sum())})
        self.counts = +self.counts
        added = {
            self._column: pa.array((1 - part).astype(np.uint8)),
            PAIR_WEIGHT: pa.array(parts_NL[rows, part]),
            PAIR: pa.array(np.diff(rows, prepend=-1) == 0).cast(pa.uint8()),
        }
        return pa.RecordBatch.from_pydict(columns_of(table.take(pa.array(rows))) | added)

    def _label(self, value: str) -> int:
        if self._positive is not None:
            return int(canonical(value) == self._positive)
        label = plain_label(value)
        if label is None:
            remedy = "Say which value counts as 1 with `positive:` in schema.yaml"
            raise self._error(_listed(self.counts), remedy)
        return label

    def check(self, rows: int, *, skipping: bool) -> None:
        """Raises a UserError unless all rows have labels (or are skipped) and both classes occur."""
        if self.missing and not skipping:
            raise UserError(
                f"{self._where}: {self.missing:,} of {rows:,} rows have no label in {self._column!r}. Give them "
                "one, or leave such rows out with skip_bad_rows, if the command takes it."
            )
        classes = {self._label(value) for value in self.counts}
        if len(classes) < 2:
            remedy = "A label needs both values, clicks and no clicks"
            if self._positive is not None:
                remedy += f"; schema.yaml says that {self._positive!r} is the positive one"
            if self._rule.where is not None:
                remedy += f"; here it is true where the value is {self._rule.where}"
            raise self._error(f"only one class: {_listed(self.counts) or 'no values'}", remedy)

    def _error(self, content: str, remedy: str) -> UserError:
        return UserError(
            f"{self._where}: the label column {self._column!r} holds {content}. {remedy}, or name another column "
            "as the label."
        )


def columns_of(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Returns the columns of a batch by name."""
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _compared(column: pa.Array, comparison: str) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Returns whether values (N) fulfil a comparison, null if missing, and which of them are no numbers."""
    rule = COMPARISON.fullmatch(comparison)
    assert rule is not None  # checked when the schema was made
    if rule[1] in _ORDERED:
        number_N, unreadable_N = numbers_of(column)
        true_N, missing_N = _ORDERED[rule[1]](number_N, float(rule[2])), np.isnan(number_N)
    else:
        encoded = coded(column)
        code_N = codes_of(encoded)
        equal = [canonical(value) == canonical(rule[2]) for value in encoded.dictionary.to_pylist()]
        true_N, missing_N = np.array([*equal, False])[code_N] == (rule[1] == "=="), code_N < 0
        unreadable_N = np.zeros(len(column), dtype=bool)
    return pa.array(true_N, mask=missing_N), unreadable_N


def _listed(values: Iterable[str]) -> str:
    return listed([repr(value) for value in values], LISTED)


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
    arrays = pool.map(lambda name: _typed(batch, name, schema, bad_rows), columns)
    typed = dict(zip(columns, arrays, strict=True))
    for name in (name for name in columns if name in schema.numeric and schema.numeric[name].days_before):
        # days before the event; NaN if one of the two is missing, or if the stamp is a day or more later, which
        # nobody knew at the event
        stamps, moments = typed[name].to_numpy(), typed[str(schema.timestamp)].to_numpy()
        present = (stamps != MISSING_STAMP) & (moments != MISSING_STAMP)
        days = (np.where(present, moments, 0) - np.where(present, stamps, 0)) / DAY_MS
        typed[name] = pa.array(np.where(present & (days > -1.0), np.maximum(days, 0.0), np.nan))
    return typed


def type_labelled(
    batch: RawBatch, schema: LogSchema, labels: LabelReader, bad_rows: BadRows, pool: Executor
) -> pa.RecordBatch:
    """Returns all used columns of a batch, typed; if bad rows are skipped, those without label or weight are
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
    raw, column = batch.table.column(name), schema.columns[name]
    if pa.types.is_null(raw.type):  # one without a single value may be of any type
        lists = isinstance(column, MultiHotColumn) and column.separator is None
        raw = raw.cast(pa.list_(pa.string()) if lists else pa.string())
    if isinstance(column, MultiHotColumn):
        return bags_of(raw, column, name)
    if is_list(raw.type) or pa.types.is_nested(raw.type):
        raise UserError(
            f"column {name!r} holds {raw.type}, not one value a row: its role is multi_hot or ignore."
        )
    if isinstance(column, (CategoricalColumn, SplitColumn)):
        return coded(raw, column.marks)
    if isinstance(column, TimestampColumn):
        return pa.array(_stamps(raw, batch, name, column, bad_rows))
    if isinstance(column, NumericColumn) and column.days_before:
        own = TimestampColumn(format=column.days_before, missing=column.missing)
        return pa.array(_stamps(raw, batch, name, own, bad_rows))
    numbers, bad = numbers_of(raw, column if isinstance(column, NumericColumn) else PLAIN_NUMBER)
    if isinstance(column, OracleColumn):
        outside = (numbers < 0.0) | (numbers > 1.0)
        bad_rows.add_unreadable(batch, name, "probability", bad | outside)
        return pa.array(np.where(outside, np.nan, numbers))
    bad_rows.add_unreadable(batch, name, "number", bad)
    return pa.array(numbers.astype(np.float32) if column.role == "weight" else numbers)


def _stamps(raw: pa.Array, batch: RawBatch, name: str, column: TimestampColumn, bad_rows: BadRows) -> Stamps:
    """Returns milliseconds (N) of a time stamp; unreadable ones are missing, as long as they are few."""
    table = batch.table
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
    codes = codes_of(values)
    bag = np.repeat(np.arange(len(raw)), lengths)[codes >= 0]
    bag_sizes = np.bincount(bag, minlength=len(raw))
    offsets = np.concatenate(([0], np.cumsum(bag_sizes))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), dictionary_array(codes[codes >= 0], values.dictionary))
