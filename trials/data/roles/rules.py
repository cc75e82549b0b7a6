"""Judges what a column is for, from its name, its type and its distinct values: the first rule that applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import (
    POINT,
    CategoricalColumn,
    Column,
    IgnoredColumn,
    MultiHotColumn,
    NumericColumn,
    OracleColumn,
    TimestampColumn,
    WeightColumn,
)
from trials.data.raw.text import is_list
from trials.data.roles import names
from trials.data.roles.multi_hot import separator_of
from trials.data.roles.sample import ColumnSample
from trials.data.roles.stamp_formats import stamp_formats_of

FEW_VALUES = 10
"""Number of distinct values up to which whole numbers are codes, whatever their name says."""
SOME_VALUES = 50
"""Number of distinct values up to which whole numbers are codes unless their name says otherwise."""
HEAVY_TAIL = 2.0
"""Skewness above which the logarithm of a number is taken (an exponential distribution has 2)."""

UNCLEAR_DATES = (
    "dates whose day and month could be either; as role timestamp with format day_first or month_first they split "
    "the log by time"
)
GROUPED_NUMBERS = (
    "numbers whose thousands are grouped by commas; written without them (2607 for 2,607) they are an input"
)
_GROUPED = r"^[+-]?\d{1,3}(,\d{3})*(\.\d+)?$"
_FIRST_GROUP_SHORTER = r"^[+-]?\d{1,2}(,|\.|$)"


@dataclass(frozen=True, slots=True)
class JudgedColumn:
    """The role of a column, and a note for people on what was seen of it."""

    column: Column
    note: str


def judge(column: ColumnSample) -> JudgedColumn:
    """Returns the role of a column that is not the label."""
    return next(judgement for rule in _RULES if (judgement := rule(column)) is not None)


def seen(column: ColumnSample) -> str:
    """Says how many values a column has, and how many are missing."""
    missing = f", {100 * column.missing / column.rows:.2g} % missing" if column.missing else ""
    return f"{column.distinct:,} values{missing}"


def _by_name(column: ColumnSample) -> JudgedColumn | None:
    if column.name == names.ORACLE:
        return JudgedColumn(OracleColumn(), "the true probability")
    if (
        names.plain(column.name) in names.WEIGHTS
        and column.numbers is not None
        and column.decimal == POINT
        and np.nanmin(column.numbers) >= 0
    ):
        return JudgedColumn(WeightColumn(), seen(column))
    return None


def _nested(column: ColumnSample) -> JudgedColumn | None:
    if is_list(column.kind) and not pa.types.is_nested(column.kind.value_type):
        note = f"lists of {column.distinct:,} values, {column.known / column.rows:.1f} per row"
        return JudgedColumn(MultiHotColumn(), note)
    return (
        JudgedColumn(IgnoredColumn(), f"nested: {column.kind}") if pa.types.is_nested(column.kind) else None
    )


def _stamp(column: ColumnSample) -> JudgedColumn | None:
    formats = stamp_formats_of(column)
    if len(formats) > 1:
        return JudgedColumn(IgnoredColumn(), UNCLEAR_DATES)
    return JudgedColumn(TimestampColumn(format=formats[0]), seen(column)) if formats else None


def _constant(column: ColumnSample) -> JudgedColumn | None:
    if not column.constant:
        return None
    return JudgedColumn(
        IgnoredColumn(), f"constant: {column.values[0]}" if column.distinct else "always missing"
    )


def _number(column: ColumnSample) -> JudgedColumn | None:
    if column.numbers is None or _leading_zeros(column):
        return None
    if not column.integral:
        return _numeric(column)
    amount, code = names.suggests_amount(column.name), names.suggests_code(column.name)
    consecutive = np.nanmax(column.numbers) - np.nanmin(column.numbers) < 1.05 * column.distinct
    if (code or consecutive) and (row_id := _row_id(column)):
        return row_id
    if column.distinct <= FEW_VALUES or (not amount and (code or column.distinct <= SOME_VALUES)):
        return _categorical(column)
    return _numeric(column)


def _leading_zeros(column: ColumnSample) -> bool:
    """Tells whether numbers begin with zeros: 007 is a code."""
    first_values = column.values[:1000].to_pylist()
    return any(len(value) > 1 and value[0] == "0" and value.isdigit() for value in first_values)


def _numeric(column: ColumnSample) -> JudgedColumn:
    assert column.numbers is not None
    finite = np.isfinite(column.numbers)
    values, counts = column.numbers[finite], column.counts[finite]
    raw = _skewness(values, counts)
    logarithmic = _skewness(np.sign(values) * np.log1p(np.abs(values)), counts)
    heavy_tailed = abs(raw) > HEAVY_TAIL and abs(logarithmic) < abs(raw)
    note = f"{seen(column)}, {values.min():.6g} to {values.max():.6g}, skewness {raw:.1f}"
    transform: Literal["log", "standard"] = "log" if heavy_tailed else "standard"
    return JudgedColumn(NumericColumn(transform=transform, decimal=column.decimal), note)


def _skewness(values: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    share = counts / counts.sum()
    centred = values - np.dot(share, values)
    deviation = np.sqrt(np.dot(share, centred**2))
    return float(np.dot(share, (centred / deviation) ** 3)) if deviation > 0 else 0.0


def _multi_hot(column: ColumnSample) -> JudgedColumn | None:
    separator = separator_of(column)
    return JudgedColumn(MultiHotColumn(separator=separator), seen(column)) if separator else None


def _grouped(column: ColumnSample) -> JudgedColumn | None:
    """Finds numbers whose thousands are grouped by commas, which would look like bags; ids of three digits each
    are a bag."""
    matched = pc.match_substring_regex(column.values, _GROUPED)
    grouped = pc.match_substring(column.values, ",")
    shorter = pc.match_substring_regex(column.values, _FIRST_GROUP_SHORTER)
    if not (pc.all(matched).as_py() and pc.any(grouped).as_py() and pc.any(shorter).as_py()):
        return None
    return JudgedColumn(IgnoredColumn(), GROUPED_NUMBERS)


def _row_id(column: ColumnSample) -> JudgedColumn | None:
    """Finds ids of rows: a value of its own in every row teaches nothing; those of a user may come back in a large
    log."""
    comes_back = names.suggests_code(column.name) and not names.suggests_row_id(column.name)
    if not column.nearly_unique or (comes_back and not column.complete):
        return None
    return JudgedColumn(IgnoredColumn(), "different in nearly every row, like a row id")


def _categorical(column: ColumnSample) -> JudgedColumn:
    return JudgedColumn(CategoricalColumn(), seen(column))


_RULES: tuple[Callable[[ColumnSample], JudgedColumn | None], ...] = (
    _by_name,
    _nested,
    _stamp,
    _constant,
    _number,
    _grouped,
    _multi_hot,
    _row_id,
    _categorical,
)
