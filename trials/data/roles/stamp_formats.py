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
    ("nanoseconds", 1_000_000_000),
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


def stamp_formats_of(column: ColumnSample) -> list[StampFormat]:
    """Returns the formats in which a column of time stamps can be read, which are two where the day could be the
    month in all values; none for any other column.

    Numbers are time stamps only where the name suggests it: an id can look like any of them.
    """
    if pa.types.is_timestamp(column.kind) or pa.types.is_date(column.kind):
        return ["iso"]
    if not column.distinct or pa.types.is_nested(column.kind):
        return []
    if column.numbers is None:
        return [name for name in _written_as(column) if _all_readable(column, name)]
    found = _numeric_format(column) if names.suggests_time(column.name) else None
    return [found] if found else []


def _written_as(column: ColumnSample) -> tuple[StampFormat, ...]:
    """Returns the formats that all values of a column of text look like."""
    if _all_match(column, _ISO):
        return ("iso",)
    if not _all_match(column, DATED):
        return ()
    return ("day_first",) if _all_match(column, _WITH_POINTS) else ("day_first", "month_first")


def _all_match(column: ColumnSample, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(column.values, pattern)).as_py())


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
