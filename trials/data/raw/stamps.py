"""Time stamps as milliseconds since 1970 (UTC), from the forms in which logs write them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import MISSING_MARKS, NumericColumn, StampFormat
from trials.data.raw.text import clean, distinct, numbers_of

Stamps = NDArray[np.int64]
MISSING_STAMP = int(np.iinfo(np.int64).min)
"""Mark of a missing time stamp in arrays of milliseconds."""
HOUR_MS, DAY_MS = 3_600_000, 86_400_000

_CLOCK = (
    r"(?:[ T,:]+(?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:[.,](?P<fraction>\d{1,3})\d*)?)?"
    r"(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?)?(?: ?(?P<zone>Z|z|UTC|GMT|[+-]\d{2}:?(?:\d{2})?))?$"
)
"""A time of day that may follow a date, and its zone."""
DATED = r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<year>\d{4})" + _CLOCK
"""A date with the year last, and maybe a time of day."""
ISO_DATED = r"^(?P<year>\d{4})[./-](?P<a>\d{1,2})[./-](?P<b>\d{1,2})" + _CLOCK
"""A date with the year first, and maybe a time of day."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH_NAME = rf"(?i)(?:^|[^a-z])(?:{'|'.join(_MONTHS)})[a-z]*[^a-z]"
"""The name of a month among other things."""
_NAMED_MONTH = (
    (r"^[\[A-Za-z, ]*(\d{1,2})[ /.-]+<(\d+)>[ /.,-]+(\d{4})[:, ]*([^\]]*)\]?$", r"\3-\2-\1 \4"),
    (r"^[A-Za-z, ]*<(\d+)> (\d{1,2})(?:st|nd|rd|th)?,? (\d{4})[, ]*(.*)$", r"\3-\1-\2 \4"),
    (r"^[A-Za-z, ]*<(\d+)> +(\d{1,2}) ([\d:]+) (?:([A-Z]{3}|[+-]\d{4}) )?(\d{4})$", r"\5-\1-\2 \3\4"),
)
"""Forms of 10/Nov/2026:13:55:36 +0000, of Nov 10, 2026 1:55 PM and of Tue Nov 10 13:55:36 UTC 2026, and what is
made of them once their month is a number in angle brackets."""
_ZERO = r"^[-0 :./TZ]*0[-0 :./TZ]*$"
"""A date of zeros, which MySQL writes for a missing one."""
_EPOCH_MS = {"seconds": 1e3, "milliseconds": 1.0, "microseconds": 1e-3, "nanoseconds": 1e-6}
_DIGITS: dict[str, tuple[int, ...]] = {
    "yymmddhh": (2, 2, 2, 2),
    "yyyymmdd": (4, 2, 2),
    "yyyymmddhh": (4, 2, 2, 2),
    "yyyymmddhhmmss": (4, 2, 2, 2, 2, 2),
}


def stamps_of(
    column: pa.Array, stamp_format: StampFormat, marks: Sequence[str] = MISSING_MARKS
) -> tuple[Stamps, NDArray[np.bool_]]:
    """Returns milliseconds (N), `MISSING_STAMP` if missing or unreadable, and which were unreadable (N)."""
    if pa.types.is_temporal(column.type):
        ms = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        return _filled(ms), np.zeros(len(column), dtype=bool)
    if stamp_format in _EPOCH_MS:
        numbers, bad = numbers_of(column, NumericColumn(missing=tuple(marks)))
        numbers = np.where(numbers == 0, np.nan, numbers)  # nobody clicked in 1970
        readable = np.isfinite(numbers) & (np.abs(numbers * _EPOCH_MS[stamp_format]) < 2.0**62)
        scaled = np.round(np.where(readable, numbers, 0.0) * _EPOCH_MS[stamp_format]).astype(np.int64)
        return np.where(readable, scaled, MISSING_STAMP), bad
    if stamp_format in _DIGITS:
        return _from_digits(column, _DIGITS[stamp_format], marks)
    codes, values = distinct(column)
    values = clean(values, marks)
    values = pc.if_else(pc.match_substring_regex(values, _ZERO), pa.scalar(None, pa.string()), values)
    if stamp_format == "month_name":
        ms = _dated_ms(_with_numbered_month(values), ISO_DATED, day_first=False)
    else:
        ms = (
            _iso_ms(values)
            if stamp_format == "iso"
            else _dated_ms(values, DATED, stamp_format == "day_first")
        )
    bad = (ms == MISSING_STAMP) & values.is_valid().to_numpy(zero_copy_only=False)
    return np.append(ms, MISSING_STAMP)[codes], np.append(bad, False)[codes]


def stamps_of_parts(
    year: NDArray[np.float64], month: NDArray[np.float64], day: NDArray[np.float64]
) -> tuple[Stamps, NDArray[np.bool_]]:
    """Returns milliseconds (N) of dates in three columns, NaN if missing, and which are no dates (N)."""
    known = np.isfinite(year) & np.isfinite(month) & np.isfinite(day)
    whole = [np.where(known, part, 1).astype(np.int64) for part in (year, month, day)]
    ms, valid = _ms_of(whole[0], whole[1], whole[2], ())
    return np.where(known & valid, ms, MISSING_STAMP), known & ~valid


def clocks_of(column: pa.Array) -> tuple[Stamps, NDArray[np.bool_]]:
    """Returns times of day as milliseconds since midnight (N), `MISSING_STAMP` if missing or unreadable, and
    which were unreadable (N)."""
    if pa.types.is_time(column.type):
        return _filled(column.cast(pa.time64("us")).cast(pa.int64())) // 1000, np.zeros(
            len(column), dtype=bool
        )
    codes, values = distinct(column)
    dated = pc.binary_join_element_wise("1970-01-01", clean(values), " ")
    ms, bad = stamps_of(dated, "iso")
    return np.append(ms, MISSING_STAMP)[codes], np.append(bad, False)[codes]


def month_numbers(column: pa.Array) -> NDArray[np.float64]:
    """Returns months as numbers (N), 1 to 12, NaN if missing; they may be written as words."""
    codes, values = distinct(column)
    numbers, _ = numbers_of(values)
    for place, word in enumerate(values.to_pylist()):
        if word and word.strip()[:3].lower() in _MONTHS:
            numbers[place] = _MONTHS.index(word.strip()[:3].lower()) + 1
    numbers = np.where((numbers >= 1) & (numbers <= 12) & (numbers % 1 == 0), numbers, np.nan)
    found: NDArray[np.float64] = np.append(numbers, np.nan)[codes]
    return found


def _with_numbered_month(values: pa.Array) -> pa.Array:
    """Returns dates that name their month with the year first and the month as a number."""
    for number, name in enumerate(_MONTHS, start=1):
        values = pc.replace_substring_regex(values, rf"(?i)\b{name}[a-z]*\.?", f"<{number}>")
    for pattern, numbered in _NAMED_MONTH:
        values = pc.replace_substring_regex(values, pattern, numbered)
    return pc.utf8_trim_whitespace(values)


def _filled(ms: pa.Array) -> Stamps:
    filled: Stamps = ms.fill_null(MISSING_STAMP).to_numpy(zero_copy_only=False)
    return filled


def _from_digits(
    column: pa.Array, widths: tuple[int, ...], marks: Sequence[str]
) -> tuple[Stamps, NDArray[np.bool_]]:
    """Reads fields of fixed width: year, month, day, and then hour, minute, second where they are written."""
    numbers, bad = numbers_of(column, NumericColumn(missing=tuple(marks)))
    numbers = np.where(numbers == 0, np.nan, numbers)  # a date of zeros
    finite = np.isfinite(numbers)
    digits_left = np.where(finite, np.clip(numbers, -1.0, 1e15), 0.0).astype(np.int64)
    fields = []
    for width in reversed(widths):
        fields.append(digits_left % 10**width)
        digits_left = digits_left // 10**width
    year, month, day, *clock = reversed(fields)
    year = year + 2000 if widths[0] == 2 else year
    ms, valid = _ms_of(year, month, day, clock)
    valid &= finite & (digits_left == 0)
    return np.where(valid, ms, MISSING_STAMP), bad | (finite & ~valid)


def _dated_ms(values: pa.Array, pattern: str, day_first: bool) -> Stamps:
    """Reads dates as a pattern has them, and maybe a time of day, of 24 hours or of 12."""
    fields = pc.extract_regex(values, pattern)
    readable = fields.is_valid().to_numpy(zero_copy_only=False)
    first, second, year, hour, minute, second_of_minute = (
        _whole(pc.struct_field(fields, name)) for name in ("a", "b", "year", "hour", "minute", "second")
    )
    half = pc.utf8_upper(pc.struct_field(fields, "half").fill_null("")).to_numpy(zero_copy_only=False)
    halved, afternoon = half != "", half == "P"
    readable &= ~halved | ((hour >= 1) & (hour <= 12))
    hour = np.where(halved, hour % 12 + 12 * afternoon, hour)
    day, month = (first, second) if day_first else (second, first)
    ms, valid = _ms_of(year, month, day, (hour, minute, second_of_minute))
    fraction = pc.utf8_rpad(pc.struct_field(fields, "fraction").fill_null(""), 3, "0")
    ms = ms + _whole(fraction) - _zone_ms(pc.struct_field(fields, "zone"))
    return np.where(readable & valid, ms, MISSING_STAMP)


def _zone_ms(zones: pa.Array) -> Stamps:
    """Returns how many milliseconds zones (+02:00, -0530, Z) are ahead of UTC."""
    fields = pc.extract_regex(zones.fill_null(""), r"^(?P<sign>[+-])(?P<hours>\d{2}):?(?P<minutes>\d{2})?$")
    hours, minutes = (_whole(pc.struct_field(fields, name)) for name in ("hours", "minutes"))
    behind = pc.equal(pc.struct_field(fields, "sign").fill_null("+"), "-").to_numpy(zero_copy_only=False)
    behind_ms: Stamps = np.where(behind, -1, 1) * (hours * HOUR_MS + minutes * 60_000)
    return behind_ms


def _whole(digits: pa.Array) -> Stamps:
    """Returns whole numbers, 0 where there are no digits."""
    digits = pc.if_else(pc.equal(digits.fill_null(""), ""), "0", digits)
    return _filled(digits.cast(pa.int64()))


def _ms_of(
    year: Stamps, month: Stamps, day: Stamps, clock: Sequence[Stamps]
) -> tuple[Stamps, NDArray[np.bool_]]:
    """Returns milliseconds (N) of dates and times of day (hours, minutes, seconds, as far as they are there), and
    which are dates of the calendar (N)."""
    months = (year - 1970).astype("M8[Y]").astype("M8[M]") + (month - 1)
    days = months.astype("M8[D]") + (day - 1)
    valid = (month >= 1) & (month <= 12) & (day >= 1) & (days.astype("M8[M]") == months)
    ms = days.astype("M8[ms]").astype(np.int64)
    for value, limit, unit in zip(clock, (24, 60, 60), (HOUR_MS, 60_000, 1_000), strict=False):
        valid &= value < limit
        ms = ms + value * unit
    return ms, valid


def _iso_ms(values: pa.Array) -> Stamps:
    """Reads ISO 8601 with or without zone: in bulk where all values are alike, else one at a time."""
    values = pc.replace_substring_regex(values, r"([.]\d{3})\d+", r"\1")  # no finer than a millisecond
    values = pc.replace_substring_regex(values, r"(\d) ?(UTC|GMT|z)$", r"\1Z")
    for kind in (pa.timestamp("ms"), pa.timestamp("ms", "UTC")):
        try:
            return _filled(values.cast(kind).cast(pa.int64()))
        except pa.ArrowInvalid:
            continue
    ms = _dated_ms(values, ISO_DATED, day_first=False)
    for place in np.flatnonzero(ms == MISSING_STAMP):  # rarer forms, such as 20261107T0930
        ms[place] = _one_iso_ms(values[place].as_py())
    return ms


def _one_iso_ms(text: str | None) -> int:
    if text is None:
        return MISSING_STAMP
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return MISSING_STAMP
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def cycle_of(stamps: Stamps, cycle: str) -> NDArray[np.int32]:
    """Returns the hour of the day (0 to 23) or the day of the week (Monday is 0), and -1 where the stamp is
    missing."""
    days, within = np.divmod(stamps, DAY_MS)
    value = within // HOUR_MS if cycle == "hour_of_day" else (days + 3) % 7  # 1970-01-01 was a Thursday
    return np.where(stamps == MISSING_STAMP, -1, value).astype(np.int32)
