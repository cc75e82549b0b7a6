"""Recognises how a column of text writes its numbers: marks of decimals and thousands, units, bounds, multipliers.

A column is one of numbers if nearly all of its values are numbers in one form. What is attached to a number is a
unit only if it is attached to all of them: `12 EUR`, but not sizes such as 2G and 16GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import NumericColumn
from trials.data.raw.text import PLAIN_NUMBER, numbers_of

Numbers = NDArray[np.float64]
MOSTLY = 0.01
"""Fraction of values that may be no numbers in a column of numbers."""
MORE_MARKS = frozenset(
    {"-", "--", "---", ".", "..", "*", "x", "X", "n.a.", "N.A.", "unknown", "Unknown", "missing", "Missing"}
)
"""Further text that stands for a missing number; in other columns it may be a value."""
FEW_WORDS, WORD_SHARE, MANY_NUMBERS = 2, 0.3, 20
"""Any other words are missing numbers if there are at most so many, in so many of the values, beside more than so
many different numbers."""
_LOOKED_AT = 5000
"""Number of distinct values in which the parts around a number are looked for."""
_PARTS = (
    r"^(?P<bound>[<>≤≥~]=?\s*)?(?P<open>\()?[+-]?(?P<prefix>[$€£¥₹₽₩₺₴₫฿]|[A-Z]{1,3}\$|[A-Z]{3}\s)?\s*[+-]?"
    r"(?P<digits>\d[\d.,'\x{a0}\x{202f}]*(?: \d{3})*(?:[.,]\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
    r"\s*(?P<suffix>[\p{L}%°€$£¥₹²³/]{0,8}?)\)?(?P<plus>\+)?$"
)
_MULTIPLIERS = frozenset("kKMB")
_GROUPED = r"^[1-9]\d{0,2}(?:%s\d{3})+(?:[.,]\d+)?$"


def number_form(
    values: pa.Array, counts: NDArray[np.int64], *, semicolons: bool
) -> tuple[Numbers, NumericColumn] | None:
    """Returns the distinct values (D) of a column as numbers, NaN if they are none, and how they are written;
    None for a column that is not one of numbers.

    A few values that are no numbers are left: when the log is prepared they raise an error that names their line.

    Args:
        values: distinct values, none missing.
        counts: number of rows of each (D).
        semicolons: whether semicolons are between the fields, as they are beside decimal commas.
    """
    found = _read_as(PLAIN_NUMBER, values, counts)
    if found.unreadable_rows:
        found = min(
            (found, *(_read_as(form, values, counts) for form in _decorated(values, counts, semicolons)))
        )
    if found.unreadable_rows > MOSTLY * counts.sum() or not np.isfinite(found.numbers).any():
        return None
    return found.numbers, found.form


@dataclass(frozen=True, slots=True)
class _Reading:
    """The values in one form."""

    form: NumericColumn
    numbers: Numbers
    unreadable_rows: int

    def __lt__(self, other: _Reading) -> bool:
        return self.unreadable_rows < other.unreadable_rows


def _read_as(form: NumericColumn, values: pa.Array, counts: NDArray[np.int64]) -> _Reading:
    numbers, unreadable = numbers_of(values, form)
    if unreadable.any() and (words := _missing_words(values, counts, numbers, unreadable)):
        form = form.replace(missing=words)
        numbers, unreadable = numbers_of(values, form)
    return _Reading(form, numbers, int(counts[unreadable].sum()))


def _missing_words(
    values: pa.Array, counts: NDArray[np.int64], numbers: Numbers, unreadable: NDArray[np.bool_]
) -> tuple[str, ...]:
    """Returns the words among numbers that stand for a missing one."""
    if unreadable.sum() > len(MORE_MARKS):
        return ()
    words = [str(word) for word in values.filter(pa.array(unreadable)).to_pylist()]
    if MORE_MARKS.issuperset(words):
        return tuple(words)
    few = len(words) <= FEW_WORDS and np.dot(unreadable, counts) <= WORD_SHARE * counts.sum()
    several = np.isfinite(numbers).sum() > MANY_NUMBERS and counts[unreadable].min() > 1
    without_digits = not any(character.isdigit() for word in words for character in word)
    return tuple(words) if few and several and without_digits else ()


def _decorated(values: pa.Array, counts: NDArray[np.int64], semicolons: bool) -> Sequence[NumericColumn]:
    """Returns the form in which the values would be numbers with something around or within them; none if they
    are not."""
    values, counts = values[:_LOOKED_AT], counts[:_LOOKED_AT]
    parts = pc.extract_regex(values, _PARTS)
    found = parts.is_valid().to_numpy(zero_copy_only=False)
    if not found.any():
        return ()
    part: dict[str, list[Any]] = {
        name: pc.struct_field(parts, name).filter(pa.array(found)).to_pylist()
        for name in ("bound", "prefix", "digits", "suffix", "plus")
    }
    rows = counts[found].tolist()
    digits = pa.array(part["digits"], pa.string())
    decorations: dict[str, Any] = _marks_of(
        digits, np.array(rows), semicolons, attached=bool(part["prefix"][0] or part["suffix"][0])
    )
    for name in ("prefix", "suffix"):
        counted: Counter[str] = Counter()
        for text, count in zip(part[name], rows, strict=True):
            counted[text.strip()] += count
        if name == "suffix" and _MULTIPLIERS.issuperset(counted.keys() - {""}):
            decorations["multipliers"] = len(counted) > ("" in counted)
            continue
        unit, most = counted.most_common(1)[0]
        if unit and most >= (1 - MOSTLY) * counted.total():
            decorations[name] = unit
    decorations["bounds"] = any(part["bound"]) or any(part["plus"])
    form = PLAIN_NUMBER.replace(**decorations)
    return () if form == PLAIN_NUMBER else (form,)


def _marks_of(
    digits: pa.Array, rows: NDArray[np.int64], semicolons: bool, *, attached: bool
) -> dict[str, str]:
    """Returns the marks of thousands and decimals in the digits of numbers.

    Args:
        digits: digits of the distinct values, with what stands between them.
        rows: number of rows of each.
        semicolons: as for `number_form`.
        attached: whether a unit shows that these are numbers, rather than bags of two ids.
    """
    shorter = pc.any(pc.match_substring_regex(digits, r"^\d{1,2}(?:\D|$)|^\d+[.]")).as_py()
    for mark, pattern in ((",", ","), ("'", "'"), (" ", "[ \u00a0\u202f]")):
        marked = digits.filter(pc.match_substring_regex(digits, pattern))
        # ids of three digits each are a bag
        if (
            len(marked)
            and (attached or shorter)
            and pc.all(pc.match_substring_regex(marked, _GROUPED % pattern)).as_py()
        ):
            with_comma = mark != "," and pc.any(pc.match_substring(marked, ",")).as_py()
            return {"thousands": mark, **({"decimal": ","} if with_comma else {})}
    commas = pc.count_substring(digits, ",").to_numpy(zero_copy_only=False)
    if not commas.any():
        return {"thousands": "."} if pc.any(pc.greater(pc.count_substring(digits, "."), 1)).as_py() else {}
    several = pc.any(pc.match_substring_regex(digits, r"\..*,")).as_py()  # 1.234,50
    each_has_one = np.dot(commas == 1, rows) >= (1 - MOSTLY) * rows.sum()
    return (
        {"decimal": ","} if commas.max() == 1 and (several or semicolons or attached or each_has_one) else {}
    )
