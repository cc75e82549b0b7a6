"""Recognises how a column writes time stamps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trials.data.log_schema import MultiHotColumn, StampFormat, TimestampColumn
from trials.data.raw.columns import (
    DATED,
    ISO_DATED,
    MISSING_STAMP,
    MONTH_NAME,
    Stamps,
    stamps_of,
    without_weights,
)
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
_MOSTLY = 0.02
"""Fraction of the values that may be no time stamps, which are missing then."""
_WITH_POINTS = r"^\d+\.\d+\."
"""Nobody writes the month first and points."""
_ZERO_OR_WORD = r"^[-0 :./TZ]*$|^[^\d]*$"
"""A date of zeros, or text without digits."""


def stamp_columns_of(column: ColumnSample) -> list[TimestampColumn]:
    """Returns the ways in which a column of time stamps can be read, which are two if the day could be the month
    in all values; none for any other column.

    Numbers are time stamps only if the name suggests it: an id can look like any of them.
    """
    if pa.types.is_timestamp(column.kind) or pa.types.is_date(column.kind):
        return [TimestampColumn()]
    if not column.distinct or pa.types.is_nested(column.kind):
        return []
    if column.numbers is not None:
        found = _numeric_format(column) if names.suggests_time(column.name) else None
        return [TimestampColumn(format=found)] if found else []
    formats: tuple[StampFormat, ...] = ()
    if _mostly_match(column, ISO_DATED) or _mostly_match(column, r"^\d{4}-?\d{2}-?\d{2}T\d{4}"):
        formats = ("iso",)
    elif _mostly_match(column, DATED):
        formats = ("day_first",) if _mostly_match(column, _WITH_POINTS) else ("day_first", "month_first")
    elif _mostly_match(column, MONTH_NAME) and _mostly_match(column, r"\d.*\d"):
        formats = ("month_name",)
    words = column.values.filter(pc.match_substring_regex(column.values, _ZERO_OR_WORD)).to_pylist()
    # a zero date is missing in any case; words are, if nearly all else is a stamp
    missing = tuple(str(word) for word in words if not any(c.isdigit() for c in word))[:10]
    ways = [TimestampColumn(format=name, missing=missing) for name in formats]
    shares = [_unreadable_share(column, way) for way in ways]
    return [way for way, share in zip(ways, shares, strict=True) if share <= _MOSTLY and share == min(shares)]


def stamps_in(column: ColumnSample, way: TimestampColumn) -> Stamps:
    """Returns the milliseconds (N) of the sample's rows, `MISSING_STAMP` if missing or unreadable."""
    return stamps_of(column.raw, way.format, way.marks)[0]


def _mostly_match(column: ColumnSample, pattern: str) -> bool:
    written = pc.invert(pc.match_substring_regex(column.values, _ZERO_OR_WORD)).to_numpy(zero_copy_only=False)
    matched = pc.match_substring_regex(column.values, pattern).to_numpy(zero_copy_only=False)
    stamps = int(np.dot(matched, column.counts))
    return stamps >= (1 - _MOSTLY) * np.dot(written, column.counts) and stamps > 0.5 * column.known


def _numeric_format(column: ColumnSample) -> StampFormat | None:
    assert column.numbers is not None
    # no single zero or slip decides
    low, high = np.quantile(column.numbers[np.isfinite(column.numbers)], (0.02, 0.98), method="nearest")
    lengths = pc.value_counts(pc.utf8_length(column.values))
    most = pc.index(lengths.field("counts"), pc.max(lengths.field("counts"))).as_py()
    usual = int(lengths.field("values")[most].as_py())
    hourly = "hour" in names.words_of(column.name)
    for name, digits in sorted(_DATES, key=lambda date: date[0].endswith("hh") != hourly):
        if usual != digits or not column.integral:
            continue
        years = 10 ** (digits - 4)
        recent = name == "yymmddhh" or (low // years >= 1990 and high // years <= 2050)
        if recent and _unreadable_share(column, TimestampColumn(format=name)) <= _MOSTLY:
            return name
    return next(
        (name for name, scale in _EPOCHS if low / scale >= _EARLIEST_S and high / scale <= _LATEST_S), None
    )


def _unreadable_share(column: ColumnSample, way: TimestampColumn) -> float:
    """Returns the share of the values that are neither a time stamp nor a mark of a missing one."""
    unreadable = stamps_of(column.values, way.format, way.marks)[1]
    return float(np.dot(unreadable, column.counts)) / max(1, column.known)


def rises(stamps: Stamps) -> bool:
    """Tells whether time stamps (N) rise or fall along the file, but for a few that came late."""
    present = stamps[stamps != MISSING_STAMP]
    moments, rank = np.unique(present, return_inverse=True)
    if len(present) < 20 or len(moments) < 3:
        return False
    return bool(abs(np.corrcoef(rank, np.arange(len(rank)))[0, 1]) > 0.9)


# Recognises columns of text that hold several values per row.

_CONTROL = tuple(map(chr, (0x1D, 0x03, 0x01, 0x02, 0x1E, 0x1F, 0x1C, 0x04, 0x05, 0x09)))
"""Separators that are never part of a value: those of Hive, MaxCompute and ASCII."""
_DISTINCTIVE = ("|", "^", " > ", "#", "~")
"""Separators that hardly occur within a value."""
_COMMON = (";", ",", "/", "&", "+", " ")
"""Separators that also occur in plain text: the values must then be made of far fewer parts."""
_LEAST_SEVERAL = {_CONTROL: 0.01, _DISTINCTIVE: 0.05, _COMMON: 0.2}
"""Share of the rows that must have several values."""
_WEIGHTED = r"^(?P<value>[^:=]+)(?P<mark>[:=])[+-]?(?:\d*\.\d+|\d+)(?:[eE][+-]?\d+)?$"


def bag_of(column: ColumnSample) -> MultiHotColumn | None:
    """Returns how the values are separated, or None for a column with one value per row."""
    for kind, least_several in _LEAST_SEVERAL.items():
        for separator in kind:
            if pc.any(pc.match_substring(column.values, separator)).as_py():
                bag = _separated_by(separator, column, least_several)
                if bag is not None:
                    return bag
    return None


def _separated_by(separator: str, column: ColumnSample, least_several: float) -> MultiHotColumn | None:
    split_values = pc.split_pattern(column.values, separator)
    parts = pc.utf8_trim_whitespace(split_values.flatten())
    whole = pc.not_equal(parts, "")
    value_of_part = pc.list_parent_indices(split_values).filter(whole).to_numpy(zero_copy_only=False)
    numbers = np.bincount(value_of_part, minlength=column.distinct)
    several = float(np.dot(numbers > 1, column.counts)) / max(1, column.known)
    if several < least_several or (len(np.unique(numbers)) == 1 and separator not in _CONTROL):
        return None
    parts = parts.filter(whole)
    # Weights after values are fractions, or belong to values that come and go: keys that nearly all bags have, as
    # in `age:3|sex:1`, are a part of the value.
    mark: str | None = None
    weighted = pc.extract_regex(parts, _WEIGHTED)
    if weighted.null_count < 0.05 * len(parts):
        fractions = pc.mean(pc.match_substring_regex(parts, r"\d\.\d")).as_py() or 0.0
        most = pc.max(pc.value_counts(pc.struct_field(weighted, "value")).field("counts")).as_py()
        if fractions > 0.5 or most <= 0.5 * len(split_values):
            mark = str(pc.struct_field(weighted, "mark").drop_null()[0])
            parts = without_weights(parts, mark)
    needed = 2.0 if separator in _COMMON else 0.0 if separator in _CONTROL else 1.0
    if column.distinct < needed * len(pc.unique(pa.array(parts))):
        return None
    return MultiHotColumn(separator=separator, weight_mark=mark)
