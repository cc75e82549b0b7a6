"""Recognises how a column writes time stamps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trials.data.log_schema import StampFormat
from trials.data.raw.stamps import DATED, stamps_of
from trials.data.roles import names
from trials.data.roles.sample import ColumnSample

_EARLIEST_S, _LATEST_S = 631_152_000, 2_524_608_000  # 1990 to 2050
_EPOCHS: tuple[tuple[StampFormat, int], ...] = (
    ("seconds", 1),
    ("milliseconds", 1_000),
    ("microseconds", 1_000_000),
)
_DATES: tuple[tuple[StampFormat, int], ...] = (
    ("yyyymmdd", 8),
    ("yymmddhh", 8),
    ("yyyymmddhh", 10),
    ("yyyymmddhhmmss", 14),
)
_ISO = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}"
_WITH_POINTS = r"^\d+\.\d+\."
"""Nobody writes the month first and points."""


def stamp_format_of(column: ColumnSample) -> StampFormat | None:
    """Returns the format of a column of time stamps, or None for any other column.

    Numbers are time stamps only where the name suggests it: an id can look like any of them.
    """
    if pa.types.is_timestamp(column.kind) or pa.types.is_date(column.kind):
        return "iso"
    if not column.distinct or pa.types.is_nested(column.kind):
        return None
    if column.numbers is None:
        if pc.all(pc.match_substring_regex(column.values, _ISO)).as_py():
            return "iso" if _all_readable(column, "iso") else None
        orders = _orders(column)
        return orders[0] if len(orders) == 1 else None
    return _numeric_format(column) if names.suggests_time(column.name) else None


def has_unclear_dates(column: ColumnSample) -> bool:
    """Tells whether all values are dates with slashes or dashes whose day and month could be either."""
    return (
        bool(column.distinct)
        and not pa.types.is_nested(column.kind)
        and column.numbers is None
        and len(_orders(column)) > 1
    )


def _orders(column: ColumnSample) -> list[StampFormat]:
    """Returns the formats, day first or month first, in which all values can be read."""
    if not pc.all(pc.match_substring_regex(column.values, DATED)).as_py():
        return []
    with_points = pc.all(pc.match_substring_regex(column.values, _WITH_POINTS)).as_py()
    orders: tuple[StampFormat, ...] = ("day_first",) if with_points else ("day_first", "month_first")
    return [order for order in orders if _all_readable(column, order)]


def _numeric_format(column: ColumnSample) -> StampFormat | None:
    assert column.numbers is not None
    low, high = np.nanmin(column.numbers), np.nanmax(column.numbers)
    lengths = set(pc.utf8_length(column.values).to_pylist())
    hourly = "hour" in names.words_of(column.name)
    for name, digits in sorted(_DATES, key=lambda date: date[0].endswith("hh") != hourly):
        if lengths == {digits} and column.integral and _all_readable(column, name):
            years = 1 if name == "yymmddhh" else 10 ** (digits - 4)
            if name == "yymmddhh" or (low // years >= 1990 and high // years <= 2050):
                return name
    return next(
        (name for name, scale in _EPOCHS if low / scale >= _EARLIEST_S and high / scale <= _LATEST_S), None
    )


def _all_readable(column: ColumnSample, name: StampFormat) -> bool:
    return not stamps_of(column.values, name)[1].any()
