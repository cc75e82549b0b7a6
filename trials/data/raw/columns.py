"""Raw columns as clean distinct values, as numbers, and as milliseconds since 1970 (UTC)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import MISSING_MARKS, POINT, NumericColumn, StampFormat

# Raw columns as clean distinct values and as numbers: what is missing, what is equal, what is a number.
#
# Text is trimmed; the usual marks are missing; whole numbers and truth values have one spelling; bytes that are
# not UTF-8 are read as Latin-1, so that one stray byte does not stop a log of millions of rows. Work on text is
# done on distinct values only.

PLAIN_NUMBER = NumericColumn()
"""A column whose numbers are written as most programs write them: 1234.5."""
_WHOLE_NUMBER = r"^([+-]?\d+)\.0$"
_TRUTHS = pa.array(("True", "TRUE", "False", "FALSE"))
_BOUND = r"^(?:[<>≤≥~]=?|[≤≥])\s*|\+$"
_MULTIPLIERS = {"kK": 1e3, "M": 1e6, "B": 1e9}
_SPACE = "[ \u00a0\u202f]"
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(?i:inf|infinity|nan)$"

_INT64_END = 2.0**63
_PLAIN = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.float16(): pa.float32()}
_SQUARABLE = 1e150
"""Size below which the square of a number is one too."""

Codes = NDArray[np.int32]


def as_text(column: pa.Array) -> pa.Array:
    """Returns any column of scalars as strings; 3.0 in a column of floats reads "3", as in a CSV of the same
    log."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_text(column.dictionary_decode())
    if is_text(kind) or pa.types.is_fixed_size_binary(kind):
        encoded = column.cast(pa.binary())  # a file may say that its bytes are UTF-8, and be wrong
        try:
            return encoded.cast(pa.string())
        except pa.ArrowInvalid:
            texts = [None if raw is None else from_bytes(raw) for raw in encoded.to_pylist()]
            return pa.array(texts, pa.string())
    if not pa.types.is_floating(kind):
        return column.cast(pa.string())
    text = pc.replace_substring_regex(column.cast(pa.string()), r"\.0$", "")
    if not pc.any(pc.match_substring(text, "e")).as_py():
        return text
    # Arrow writes whole ones of eleven digits or more with an exponent, as no column of whole numbers has them
    numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    whole = (np.abs(numbers) < _INT64_END) & (numbers == np.trunc(numbers))
    digits = pa.array(np.where(whole, numbers, 0.0).astype(np.int64)).cast(pa.string())
    return pc.if_else(pa.array(whole), digits, text)


def plain(column: pa.Array) -> pa.Array:
    """Returns a column in a type that Arrow's functions take: views as what they view, UUIDs in hexadecimal
    digits, other extension types as they are stored, floats of two bytes as four."""
    kind = column.type
    if str(kind) == "extension<arrow.uuid>":
        return pa.array([None if each is None else str(each) for each in column.to_pylist()], pa.string())
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    return column.cast(_PLAIN[kind]) if kind in _PLAIN else column


def from_bytes(raw: bytes) -> str:
    """Returns what bytes spell: in UTF-8, or in Latin-1 if they are none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def clean(values: pa.Array, marks: Sequence[str] = MISSING_MARKS) -> pa.Array:
    """Returns trimmed strings in one spelling (`spelled`), null if a mark says missing."""
    values = spelled(pc.utf8_trim_whitespace(values))
    missing = pc.is_in(values, pa.array(marks, pa.string()))
    return pc.if_else(missing, pa.scalar(None, pa.string()), values)


def spelled(values: pa.Array) -> pa.Array:
    """Returns strings with whole numbers and truth values as columns of numbers and of truth values have them: "3"
    for "3.0", which is what a CSV has of ids among which one is missing, and "true" for "True"."""
    if pc.any(pc.ends_with(values, ".0")).as_py():
        values = pc.replace_substring_regex(values, _WHOLE_NUMBER, r"\1")
    truths = pc.is_in(values, _TRUTHS)
    return pc.if_else(truths, pc.utf8_lower(values), values) if pc.any(truths).as_py() else values


def distinct(column: pa.Array) -> tuple[Codes, pa.Array]:
    """Returns codes (N) and the distinct values they stand for, as text; -1 is null."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    return codes_of(encoded), as_text(encoded.dictionary)


def codes_of(column: pa.DictionaryArray) -> Codes:
    """Returns the place of each row's value (N) in the dictionary; -1 is null."""
    codes: Codes = column.indices.cast(pa.int32()).fill_null(-1).to_numpy(zero_copy_only=False)
    return codes


def coded(
    column: pa.Array,
    marks: Sequence[str] = MISSING_MARKS,
    *,
    wrapping: str = "",
    weight_mark: str | None = None,
) -> pa.DictionaryArray:
    """Returns a column as codes of its distinct clean values, null if missing.

    Args:
        column: any column of scalars.
        marks: text that is a missing value.
        wrapping: characters that are trimmed too.
        weight_mark: what begins the weight after a value, which is left out.
    """
    codes, raw = distinct(column)
    raw = pc.utf8_trim(raw, characters=wrapping) if wrapping else raw
    raw = without_weights(raw, weight_mark) if weight_mark else raw
    merged = clean(raw, marks).dictionary_encode()  # " a" and "a" become one
    to_merged = np.append(codes_of(merged), -1).astype(np.int32)
    return dictionary_array(to_merged[codes], merged.dictionary)


def without_weights(values: pa.Array, mark: str) -> pa.Array:
    """Returns values of bags without the weight that follows the last mark of each."""
    return pc.replace_substring_regex(values, f"{re.escape(mark)}[^{mark}]*$", "")


def dictionary_array(codes: Codes, values: pa.Array) -> pa.DictionaryArray:
    """Returns Arrow's form of codes (N), where -1 is null."""
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), values)


def numbers_of(
    column: pa.Array, form: NumericColumn = PLAIN_NUMBER
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns numbers (N), NaN if missing, infinite, unreadable, or too large for a deviation (such as the
    largest float, a usual mark for no value), and which were unreadable (N); `form` is how text has them."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int64()) if column.type.bit_width == 64 else column.cast(pa.int32())
    if is_text(column.type):
        numbers, unreadable = _numbers_of_text(as_text(column), form)
    else:
        numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        unreadable = np.zeros(len(column), dtype=bool)
    return np.where(np.abs(numbers) < _SQUARABLE, numbers, np.nan), unreadable


def _numbers_of_text(text: pa.Array, form: NumericColumn) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns numbers (N), NaN if missing or unreadable, and which were unreadable (N)."""
    if form.decimal == POINT:
        try:
            numbers: NDArray[np.float64] = text.cast(pa.float64()).to_numpy(zero_copy_only=False)
            return numbers, np.zeros(len(text), dtype=bool)
        except pa.ArrowInvalid:
            pass  # something in it is no plain number
    text = clean(text, form.marks)
    if form.bounds:
        text = pc.replace_substring_regex(text, _BOUND, "")
    if form.prefix:
        text = pc.replace_substring_regex(text, rf"^([(+-]*)\s*{_escaped(form.prefix)}\s*", r"\1")
    if form.suffix:
        text = pc.replace_substring_regex(text, rf"\s*{_escaped(form.suffix)}(\)?)$", r"\1")
    text = pc.replace_substring_regex(text, r"^\((.+)\)$", r"-\1")  # an accountant's negative amount
    factor = np.ones(len(text))
    if form.multipliers:
        for letters, times in _MULTIPLIERS.items():
            scaled = pc.match_substring_regex(text, rf"\d\s*[{letters}]$").fill_null(False)
            factor[scaled.to_numpy(zero_copy_only=False)] = times
        text = pc.replace_substring_regex(text, r"(\d)\s*[kKMB]$", r"\1")
    # without the mark that groups thousands, and with a point before decimals
    thousands = form.thousands or ("." if form.decimal != POINT else "")
    if thousands:
        mark = _SPACE if thousands.isspace() else _escaped(thousands)
        grouped = pc.match_substring_regex(text, rf"^[+-]?\d{{1,3}}(?:{mark}\d{{3}})+(?:[.,eE]|$)")
        text = pc.if_else(grouped, pc.replace_substring_regex(text, mark, ""), text)
    if form.decimal != POINT:
        unclear = pc.match_substring(text, POINT)  # a point that does not group thousands
        text = pc.if_else(unclear, "unreadable", pc.replace_substring(text, form.decimal, POINT))
    readable = pc.match_substring_regex(text, _NUMBER).fill_null(True)
    values = pc.if_else(readable, text, pa.scalar(None, pa.string())).cast(pa.float64())
    return values.to_numpy(zero_copy_only=False) * factor, ~readable.to_numpy(zero_copy_only=False)


def _escaped(text: str) -> str:
    """Returns a regular expression of RE2 for a text; any space stands for any other."""
    return _SPACE.join(re.escape(part) for part in re.split(r"\s", text))


def is_list(kind: pa.DataType) -> bool:
    """Tells whether a column holds a list per row."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Tells whether a column holds strings or bytes."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


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
        # fields of fixed width: year, month, day, and then hour, minute, second, if they are written
        numbers, bad = numbers_of(column, NumericColumn(missing=tuple(marks)))
        numbers = np.where(numbers == 0, np.nan, numbers)  # a date of zeros
        finite = np.isfinite(numbers)
        digits_left = np.where(finite, np.clip(numbers, -1.0, 1e15), 0.0).astype(np.int64)
        fields = []
        for width in reversed(_DIGITS[stamp_format]):
            fields.append(digits_left % 10**width)
            digits_left = digits_left // 10**width
        year, month, day, *clock = reversed(fields)
        year = year + 2000 if stamp_format == "yymmddhh" else year
        ms, valid = _ms_of(year, month, day, clock)
        valid &= finite & (digits_left == 0)
        return np.where(valid, ms, MISSING_STAMP), bad | (finite & ~valid)
    codes, values = distinct(column)
    values = clean(values, marks)
    values = pc.if_else(pc.match_substring_regex(values, _ZERO), pa.scalar(None, pa.string()), values)
    if stamp_format == "iso":
        ms = _iso_ms(values)
    elif stamp_format == "month_name":  # with the year first and the month as a number
        dates = values
        for number, name in enumerate(_MONTHS, start=1):
            dates = pc.replace_substring_regex(dates, rf"(?i)\b{name}[a-z]*\.?", f"<{number}>")
        for pattern, numbered in _NAMED_MONTH:
            dates = pc.replace_substring_regex(dates, pattern, numbered)
        ms = _dated_ms(pc.utf8_trim_whitespace(dates), ISO_DATED, day_first=False)
    else:
        ms = _dated_ms(values, DATED, stamp_format == "day_first")
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
        clocks = _filled(column.cast(pa.time64("us")).cast(pa.int64())) // 1000
        return clocks, np.zeros(len(column), dtype=bool)
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


def _filled(ms: pa.Array) -> Stamps:
    filled: Stamps = ms.fill_null(MISSING_STAMP).to_numpy(zero_copy_only=False)
    return filled


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
    # how far zones (+02:00, -0530, Z) are ahead of UTC
    zones = pc.struct_field(fields, "zone").fill_null("")
    parts = pc.extract_regex(zones, r"^(?P<sign>[+-])(?P<hours>\d{2}):?(?P<minutes>\d{2})?$")
    hours, minutes = (_whole(pc.struct_field(parts, name)) for name in ("hours", "minutes"))
    behind = pc.equal(pc.struct_field(parts, "sign").fill_null("+"), "-").to_numpy(zero_copy_only=False)
    ahead_ms = np.where(behind, -1, 1) * (hours * HOUR_MS + minutes * 60_000)
    return np.where(readable & valid, ms + _whole(fraction) - ahead_ms, MISSING_STAMP)


def _whole(digits: pa.Array) -> Stamps:
    """Returns whole numbers, 0 if there are no digits."""
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
    """Reads ISO 8601 with or without zone: in bulk if all values are alike, else one at a time."""
    values = pc.replace_substring_regex(values, r"([.]\d{3})\d+", r"\1")  # no finer than a millisecond
    values = pc.replace_substring_regex(values, r"(\d) ?(UTC|GMT|z)$", r"\1Z")
    for kind in (pa.timestamp("ms"), pa.timestamp("ms", "UTC")):
        try:
            return _filled(values.cast(kind).cast(pa.int64()))
        except pa.ArrowInvalid:
            continue
    ms = _dated_ms(values, ISO_DATED, day_first=False)
    for place in np.flatnonzero(ms == MISSING_STAMP):  # rarer forms, such as 20261107T0930
        try:
            moment = datetime.fromisoformat(values[place].as_py() or "")
        except ValueError:
            continue
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        ms[place] = round(moment.timestamp() * 1000)
    return ms


def cycle_of(stamps: Stamps, cycle: str) -> NDArray[np.int32]:
    """Returns the hour of the day (0 to 23) or the day of the week (Monday is 0), and -1 if the stamp is
    missing."""
    days, within = np.divmod(stamps, DAY_MS)
    value = within // HOUR_MS if cycle == "hour_of_day" else (days + 3) % 7  # 1970-01-01 was a Thursday
    return np.where(stamps == MISSING_STAMP, -1, value).astype(np.int32)
