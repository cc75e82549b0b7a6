"""Judges what a column is for, from its name, its type and its distinct values: the first rule that applies."""

from __future__ import annotations

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
    """Returns the role of a column that is not the label, by the first rule that applies."""
    name, kind = column.name, column.kind
    if name == names.ORACLE:
        return JudgedColumn(OracleColumn(), "the true probability")
    plain_numbers = column.numbers if column.form == PLAIN_NUMBER else None
    if plain_numbers is not None and names.plain(name) in names.WEIGHTS and np.nanmin(plain_numbers) >= 0:
        return JudgedColumn(WeightColumn(), "named like the weight of an example")
    if is_list(kind) and not pa.types.is_nested(kind.value_type):
        note = f"lists of {column.distinct:,} values, {column.known / column.rows:.1f} per row"
        return JudgedColumn(MultiHotColumn(), note)
    if pa.types.is_nested(kind):
        return JudgedColumn(IgnoredColumn(), f"nested: {kind}")
    ways = stamp_columns_of(column)
    if len(ways) > 1:
        ways = [way for way in ways if rises(stamps_in(column, way))]
        if len(ways) != 1:
            sentence = (
                f"not used: {name!r} ({UNCLEAR_DATES}); as the time of the event it is "
                f"columns.{name}.format=day_first (or month_first)"
            )
            return JudgedColumn(IgnoredColumn(), UNCLEAR_DATES, sentence)
    if ways:
        return JudgedColumn(ways[0], "time stamps")
    if column.constant:
        why = f"constant: {column.values[0]}" if column.distinct else "always missing"
        return JudgedColumn(IgnoredColumn(), why)
    if names.suggests_index(name) and column.integral and column.nearly_unique:
        sentence = (
            f"not used: {name!r}, the index that a data frame writes beside its rows; `columns.{name}=numeric` "
            "makes it an input"
        )
        return JudgedColumn(IgnoredColumn(), "the index of a data frame's rows", sentence)
    if (number := _number(column)) is not None:
        return number
    if (bag := bag_of(column)) is not None:
        weights = f"{name!r} holds bags of values with weights: the values are read, the weights are not"
        why = f"several values between {bag.separator!r}"
        return JudgedColumn(bag, why, weights if bag.weight_mark else None)
    return _row_id(column) or _categorical(column)


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


def _number(column: ColumnSample) -> JudgedColumn | None:
    """Returns the role of a column of numbers; None for any other, and for one of codes such as 007."""
    if column.numbers is None:
        return None
    if column.integral and not names.suggests_amount(column.name) and _like_hashes(column.numbers):
        return _row_id(column) or _categorical(column, "whole numbers as long as hashes: ids")
    if column.integral and names.says_nothing(column.name) and _scattered(column):
        return _categorical(column, "whole numbers far apart that come again: ids")
    first_values = column.values[:1000].to_pylist()
    if any(len(value) > 1 and value[0] == "0" and value.isdigit() for value in first_values):
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


def _like_hashes(numbers: NDArray[np.float64]) -> bool:
    """Tells whether whole numbers are ids: too large to be exact as numbers, or of one length like hashes."""
    sizes = np.abs(numbers[np.isfinite(numbers)])
    digits = np.floor(np.log10(np.maximum(sizes, 1.0))) + 1
    alike = np.mean(digits >= digits.max() - 1) >= 0.9 and digits.max() >= HASH_DIGITS
    signed = 0.1 < np.mean(numbers < 0) < 0.9
    moments = any(np.all((sizes >= 6.3e8 * scale) & (sizes <= 2.6e9 * scale)) for scale in (1e3, 1e6, 1e9))
    hashes = alike and (signed or sizes.max() > 2**31) and not moments
    return bool(hashes or np.mean(sizes > EXACT) >= 0.1)


def _scattered(column: ColumnSample) -> bool:
    """Tells whether whole numbers of a column whose name says nothing, such as c4 or V12, are ids: they come
    again, lie far apart, and small ones are no more frequent than large ones, as those of counts are."""
    assert column.numbers is not None
    values, counts, highest = column.numbers, column.counts, np.nanmax(column.numbers)
    spread = float(highest - np.nanmin(values)) / column.distinct
    if column.distinct <= SOME_VALUES or spread < SCATTERED or column.known < REPEATS * column.distinct:
        return False
    # counts begin near zero and become rarer
    by_value, by_count = (np.argsort(np.argsort(each)) for each in (values, counts))
    falls = float(np.corrcoef(by_value, by_count)[0, 1]) < -0.5
    order = np.argsort(values)
    low = values[order][np.searchsorted(np.cumsum(counts[order]), 0.05 * counts.sum())]
    of_one_size = np.nanquantile(values, 0.1) * 1000 > highest
    return bool(of_one_size and np.mean(values % 10 == 0) <= 0.3 and not (falls and low < 0.02 * highest))


def _numeric(column: ColumnSample) -> JudgedColumn:
    assert column.numbers is not None
    finite = np.isfinite(column.numbers)
    values, counts = column.numbers[finite], column.counts[finite]
    transform, form = transform_of(values, counts), column.form
    tail = " with a heavy tail" if transform == "log" else ""
    why = f"numbers{tail}, {values.min():.6g} to {values.max():.6g}"
    sentence = None
    if names.plain(column.name) in MAYBE_WEIGHTS and values.min() >= 0:
        sentence = (
            f"{column.name!r} is a feature; if it is the weight of the example, pass "
            f"`columns.{column.name}=weight`"
        )
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
