"""Raw columns as clean distinct values and as numbers: what is missing, what is equal, what is a number.

Text is trimmed; the usual marks are missing; whole numbers and truth values have one spelling; bytes that are not
UTF-8 are read as Latin-1, so that one stray byte does not stop a log of millions of rows. Work on text is done on
distinct values only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import MISSING_MARKS, POINT, NumericColumn

PLAIN_NUMBER = NumericColumn()
"""A column whose numbers are written as most programs write them: 1234.5."""
_WHOLE_NUMBER = r"^([+-]?\d+)\.0$"
_TRUTHS = pa.array(("True", "TRUE", "False", "FALSE"))
_BOUND = r"^(?:[<>≤≥~]=?|[≤≥])\s*|\+$"
_MULTIPLIERS = {"kK": 1e3, "M": 1e6, "B": 1e9}
_SPACE = "[ \u00a0\u202f]"
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?(?i:inf|infinity|nan)$"

_INT64_END = 2.0**63
_PLAIN = (
    (pa.types.is_string_view, pa.string()),
    (pa.types.is_binary_view, pa.binary()),
    (pa.types.is_float16, pa.float32()),
)
_SQUARABLE = 1e150
"""Size below which the square of a number is one too."""

Codes = NDArray[np.int32]


def as_text(column: pa.Array) -> pa.Array:
    """Returns any column of scalars as strings; 3.0 in a column of floats reads "3", as in a CSV of the same
    log."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_text(column.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _decoded(column.cast(pa.binary()))  # a file may say that its bytes are UTF-8, and be wrong
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return _decoded(column.cast(pa.binary()))
    if pa.types.is_floating(kind):
        return _floats_as_text(column)
    return column.cast(pa.string())


def _floats_as_text(column: pa.Array) -> pa.Array:
    """Returns floats as strings; Arrow writes whole ones of eleven digits or more with an exponent, as no column
    of whole numbers has them."""
    text = pc.replace_substring_regex(column.cast(pa.string()), r"\.0$", "")
    if not pc.any(pc.match_substring(text, "e")).as_py():
        return text
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
    for is_kind, other in _PLAIN:
        if is_kind(kind):
            return column.cast(other)
    return column


def _decoded(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if raw is None else from_bytes(raw) for raw in column.to_pylist()], pa.string())


def from_bytes(raw: bytes) -> str:
    """Returns what bytes spell: in UTF-8, or in Latin-1 if they are none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def clean(values: pa.Array, marks: Sequence[str] = MISSING_MARKS) -> pa.Array:
    """Returns trimmed strings in one spelling (`spelled`), null where a mark says missing."""
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
    codes = encoded.indices.cast(pa.int32()).fill_null(-1).to_numpy(zero_copy_only=False)
    return codes, as_text(encoded.dictionary)


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
    to_merged = np.append(merged.indices.fill_null(-1).to_numpy(zero_copy_only=False), -1).astype(np.int32)
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
    text = _ungrouped(text, form)
    readable = pc.match_substring_regex(text, _NUMBER).fill_null(True)
    values = pc.if_else(readable, text, pa.scalar(None, pa.string())).cast(pa.float64())
    return values.to_numpy(zero_copy_only=False) * factor, ~readable.to_numpy(zero_copy_only=False)


def _ungrouped(text: pa.Array, form: NumericColumn) -> pa.Array:
    """Returns numbers without the mark that groups their thousands, and with a point before their decimals."""
    thousands = form.thousands or ("." if form.decimal != POINT else "")
    if thousands:
        mark = _SPACE if thousands.isspace() else _escaped(thousands)
        grouped = pc.match_substring_regex(text, rf"^[+-]?\d{{1,3}}(?:{mark}\d{{3}})+(?:[.,eE]|$)")
        text = pc.if_else(grouped, pc.replace_substring_regex(text, mark, ""), text)
    if form.decimal == POINT:
        return text
    unclear = pc.match_substring(text, POINT)  # a point that does not group thousands
    return pc.if_else(unclear, "unreadable", pc.replace_substring(text, form.decimal, POINT))


def _escaped(text: str) -> str:
    """Returns a regular expression of RE2 for a text; any space stands for any other."""
    return _SPACE.join(re.escape(part) for part in re.split(r"\s", text))


def is_list(kind: pa.DataType) -> bool:
    """Tells whether a column holds a list per row."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Tells whether a column holds strings or bytes."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
