"""Judges what a column is for, from its name, its type and its distinct values: the first rule that applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.log_schema import (
    CategoricalColumn,
    Column,
    IgnoredColumn,
    MultiHotColumn,
    OracleColumn,
    WeightColumn,
)
from trials.data.raw.columns import PLAIN_NUMBER, is_list
from trials.data.roles import names
from trials.data.roles.forms import bag_of, rises, stamp_columns_of, stamps_in
from trials.data.roles.sample import ColumnSample
from trials.data.schema_yaml import parse_column

FEW_VALUES = 10
"""Number of distinct values up to which whole numbers are codes, whatever their name says."""
SOME_VALUES = 50
"""Number of distinct values up to which whole numbers are codes unless their name says otherwise."""
HEAVY_TAIL = 2.0
"""Skewness above which the logarithm of a number is taken (an exponential distribution has 2)."""
MAYBE_WEIGHTS = ("weight", "weights", "wt", "instance_weight", "importance")
"""Names of a number that may be the weight of the example, or of a person."""

UNCLEAR_DATES = "dates whose day and month could be either"
EXACT = 2.0**53
"""Size from which on whole numbers are not exact as floats."""
HASH_DIGITS = 9
"""Number of digits from which on whole numbers of one length look like hashes."""

SCATTERED, REPEATS = 20, 3
"""Mean distance of whole numbers, and mean number of rows of each, from which on they look like ids."""


@dataclass(frozen=True, slots=True)
class JudgedColumn:
    """The role of a column, and the reason for it."""

    column: Column
    why: str
    sentence: str | None = None
    """A sentence on a decision that may be wanted otherwise, with the key; empty if another sentence has it."""
    given: bool = False
    """Whether a person said so."""


def judge(column: ColumnSample) -> JudgedColumn:
    """Returns the role of a column that is not the label."""
    return next(judgement for rule in _RULES if (judgement := rule(column)) is not None)


def judge_as(column: ColumnSample, given: str | dict[str, Any]) -> JudgedColumn:
    """Returns a column in the role that a person wants, written as it is found to be.

    Args:
        column: of the sample.
        given: a role, or keys of a column as in schema.yaml, which go before those found.

    Raises:
        UserError: for an unknown role, or keys that the role does not have.
    """
    keys = {"role": given} if isinstance(given, str) else dict(given)
    found = judge(column).column
    role = keys.get("role", found.role)
    stamps = stamp_columns_of(column)
    if role == "numeric" and stamps and column.numbers is None:
        raise UserError(
            f"columns.{column.name}: these are time stamps; a number is made of them if another column is the "
            "event's time (role timestamp)."
        )
    ways: dict[str, Column | None] = {
        found.role: found,
        "categorical": CategoricalColumn(not_missing=column.not_missing),
        "numeric": _numeric(column).column if column.numbers is not None else None,
        "timestamp": stamps[0] if stamps else None,
        "multi_hot": bag_of(column),
    }
    if (way := ways.get(str(role))) is not None:
        keys = way.to_dict() | keys
    return JudgedColumn(parse_column(keys, f"columns.{column.name}"), "as you said", given=True)


def _by_name(column: ColumnSample) -> JudgedColumn | None:
    if column.name == names.ORACLE:
        return JudgedColumn(OracleColumn(), "the true probability")
    if column.numbers is None or column.form != PLAIN_NUMBER or np.nanmin(column.numbers) < 0:
        return None
    if names.plain(column.name) in names.WEIGHTS:
        return JudgedColumn(WeightColumn(), "named like the weight of an example")
    return None


def _nested(column: ColumnSample) -> JudgedColumn | None:
    if is_list(column.kind) and not pa.types.is_nested(column.kind.value_type):
        note = f"lists of {column.distinct:,} values, {column.known / column.rows:.1f} per row"
        return JudgedColumn(MultiHotColumn(), note)
    return (
        JudgedColumn(IgnoredColumn(), f"nested: {column.kind}") if pa.types.is_nested(column.kind) else None
    )


def _stamp(column: ColumnSample) -> JudgedColumn | None:
    ways = stamp_columns_of(column)
    rising = [way for way in ways if rises(stamps_in(column, way))] if len(ways) > 1 else ways
    if len(ways) > 1 and len(rising) != 1:
        sentence = (
            f"not used: {column.name!r} ({UNCLEAR_DATES}); as the time of the event it is "
            f"columns.{column.name}.format=day_first (or month_first)"
        )
        return JudgedColumn(IgnoredColumn(), UNCLEAR_DATES, sentence)
    return JudgedColumn(rising[0], "time stamps") if rising else None


def _constant(column: ColumnSample) -> JudgedColumn | None:
    if not column.constant:
        return None
    return JudgedColumn(
        IgnoredColumn(), f"constant: {column.values[0]}" if column.distinct else "always missing"
    )


def _index(column: ColumnSample) -> JudgedColumn | None:
    if not (names.suggests_index(column.name) and column.integral and column.nearly_unique):
        return None
    return JudgedColumn(
        IgnoredColumn(),
        "the index of a data frame's rows",
        f"not used: {column.name!r}, the index that a data frame writes beside its rows; "
        f"`columns.{column.name}=numeric` makes it an input",
    )


def _hashed(column: ColumnSample) -> JudgedColumn | None:
    """Finds whole numbers that are ids: too large to be exact as numbers, or of one length like hashes."""
    if column.numbers is None or not column.integral or names.suggests_amount(column.name):
        return None
    sizes = np.abs(column.numbers[np.isfinite(column.numbers)])
    digits = np.floor(np.log10(np.maximum(sizes, 1.0))) + 1
    alike = np.mean(digits >= digits.max() - 1) >= 0.9 and digits.max() >= HASH_DIGITS
    signed = 0.1 < np.mean(column.numbers < 0) < 0.9
    moments = any(np.all((sizes >= 6.3e8 * scale) & (sizes <= 2.6e9 * scale)) for scale in (1e3, 1e6, 1e9))
    hashes = alike and (signed or sizes.max() > 2**31) and not moments
    if not hashes and np.mean(sizes > EXACT) < 0.1:
        return None
    return _row_id(column) or _categorical(column, "whole numbers as long as hashes: ids")


def _scattered(column: ColumnSample) -> JudgedColumn | None:
    """Finds ids among whole numbers of a column whose name says nothing, such as c4 or V12: they come again, lie
    far apart, and small ones are no more frequent than large ones, as those of counts are."""
    if column.numbers is None or not column.integral or not names.says_nothing(column.name):
        return None
    values, counts = column.numbers, column.counts
    spread = float(np.nanmax(values) - np.nanmin(values)) / column.distinct
    if column.distinct <= SOME_VALUES or spread < SCATTERED or column.known < REPEATS * column.distinct:
        return None
    # counts begin near zero and become rarer
    by_value, by_count = (np.argsort(np.argsort(each)) for each in (values, counts))
    falls = float(np.corrcoef(by_value, by_count)[0, 1]) < -0.5
    order = np.argsort(values)
    low = values[order][np.searchsorted(np.cumsum(counts[order]), 0.05 * counts.sum())]
    of_one_size = np.nanquantile(values, 0.1) * 1000 > np.nanmax(values)
    if not of_one_size or np.mean(values % 10 == 0) > 0.3 or (falls and low < 0.02 * np.nanmax(values)):
        return None
    return _categorical(column, "whole numbers far apart that come again: ids")


def _number(column: ColumnSample) -> JudgedColumn | None:
    if column.numbers is None or _leading_zeros(column):
        return None
    if not column.integral:
        return _numeric(column)
    form = column.form
    measured = bool(form.prefix or form.suffix or form.thousands or form.multipliers or form.bounds)
    amount, code = measured or names.suggests_amount(column.name), names.suggests_code(column.name)
    consecutive = np.nanmax(column.numbers) - np.nanmin(column.numbers) < 1.05 * column.distinct
    if (code or consecutive) and (row_id := _row_id(column)):
        return row_id
    if column.distinct <= FEW_VALUES:
        return _categorical(column, "whole numbers with few values")
    if not amount and (code or column.distinct <= SOME_VALUES):
        return _categorical(column, "named like a code" if code else "whole numbers with few values")
    return _numeric(column)


def _leading_zeros(column: ColumnSample) -> bool:
    """Tells whether numbers begin with zeros: 007 is a code."""
    first_values = column.values[:1000].to_pylist()
    return any(len(value) > 1 and value[0] == "0" and value.isdigit() for value in first_values)


def _numeric(column: ColumnSample) -> JudgedColumn:
    assert column.numbers is not None
    finite = np.isfinite(column.numbers)
    values, counts = column.numbers[finite], column.counts[finite]
    transform = transform_of(values, counts)
    heavy_tailed = transform == "log"
    why = f"{'numbers with a heavy tail' if heavy_tailed else 'numbers'}, {values.min():.6g} to {values.max():.6g}"
    sentence = None
    if names.plain(column.name) in MAYBE_WEIGHTS and values.min() >= 0:
        sentence = (
            f"{column.name!r} is a feature; if it is the weight of the example, pass "
            f"`columns.{column.name}=weight`"
        )
    form = column.form
    for mark in form.missing:
        why += f", {mark!r} is missing"
    return JudgedColumn(form.replace(transform=transform), why, sentence)


def transform_of(values: NDArray[np.float64], counts: NDArray[np.int64]) -> Literal["standard", "log"]:
    """Returns how distinct numbers, each of which occurs so often, are scaled: log for a heavy tail."""
    raw = _skewness(values, counts)
    logarithmic = _skewness(np.sign(values) * np.log1p(np.abs(values)), counts)
    heavy_tailed = len(values) > FEW_VALUES and abs(raw) > HEAVY_TAIL and abs(logarithmic) < abs(raw)
    return "log" if heavy_tailed else "standard"


def _skewness(values: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    share = counts / counts.sum()
    centred = values - np.dot(share, values)
    deviation = np.sqrt(np.dot(share, centred**2))
    return float(np.dot(share, (centred / deviation) ** 3)) if deviation > 0 else 0.0


def _multi_hot(column: ColumnSample) -> JudgedColumn | None:
    bag = bag_of(column)
    if bag is None:
        return None
    sentence = (
        f"{column.name!r} holds bags of values with weights: the values are read, the weights are not"
        if bag.weight_mark
        else None
    )
    return JudgedColumn(bag, f"several values between {bag.separator!r}", sentence)


def _row_id(column: ColumnSample) -> JudgedColumn | None:
    """Finds ids of rows: a value of its own in every row teaches nothing; those of a user may come back in a large
    log."""
    comes_back = names.suggests_code(column.name) and not names.suggests_row_id(column.name)
    if not column.nearly_unique or (comes_back and not column.complete):
        return None
    return JudgedColumn(IgnoredColumn(), "different in nearly every row, like a row id")


def _categorical(column: ColumnSample, why: str = "text") -> JudgedColumn:
    kept = column.not_missing
    if kept:
        why += f"; {' and '.join(map(repr, kept))} read as a value"
    elif column.words_missing:
        why += f"; {' and '.join(map(repr, column.words_missing))} read as missing"
    return JudgedColumn(CategoricalColumn(not_missing=kept), why)


_RULES: tuple[Callable[[ColumnSample], JudgedColumn | None], ...] = (
    _by_name,
    _nested,
    _stamp,
    _constant,
    _index,
    _hashed,
    _scattered,
    _number,
    _multi_hot,
    _row_id,
    _categorical,
)
