"""A bounded sample of each column: its distinct values, how often each occurs, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.log_schema import MISSING_MARKS, NumericColumn
from trials.data.raw.columns import PLAIN_NUMBER, as_text, coded, codes_of, is_list, numbers_of
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows, read_batches, repeated

# Recognises how a column of text writes its numbers: marks of decimals and thousands, units, bounds,
# multipliers.
#
# A column is one of numbers if nearly all of its values are numbers in one form. What is attached to a number is
# a unit only if it is attached to all of them: `12 EUR`, but not sizes such as 2G and 16GB.

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
    readings = [_read_as(PLAIN_NUMBER, values, counts)]
    if readings[0][2] and (form := _decorated(values, counts, semicolons)) is not None:
        readings.append(_read_as(form, values, counts))
    numbers, form, unreadable_rows = min(readings, key=lambda reading: reading[2])
    if unreadable_rows > MOSTLY * counts.sum() or not np.isfinite(numbers).any():
        return None
    return numbers, form


def _read_as(
    form: NumericColumn, values: pa.Array, counts: NDArray[np.int64]
) -> tuple[Numbers, NumericColumn, int]:
    """Returns the values in a form, the form with the words that stand for a missing number, and the number of
    rows that are not readable."""
    numbers, unreadable = numbers_of(values, form)
    if 0 < unreadable.sum() <= len(MORE_MARKS):
        words = [str(word) for word in values.filter(pa.array(unreadable)).to_pylist()]
        few = len(words) <= FEW_WORDS and np.dot(unreadable, counts) <= WORD_SHARE * counts.sum()
        several = np.isfinite(numbers).sum() > MANY_NUMBERS and counts[unreadable].min() > 1
        without_digits = not any(character.isdigit() for word in words for character in word)
        if MORE_MARKS.issuperset(words) or (few and several and without_digits):
            form = form.replace(missing=tuple(words))
            numbers, unreadable = numbers_of(values, form)
    return numbers, form, int(counts[unreadable].sum())


def _decorated(values: pa.Array, counts: NDArray[np.int64], semicolons: bool) -> NumericColumn | None:
    """Returns the form in which the values would be numbers with something around or within them; None if they
    are not."""
    values, counts = values[:_LOOKED_AT], counts[:_LOOKED_AT]
    parts = pc.extract_regex(values, _PARTS)
    found = parts.is_valid().to_numpy(zero_copy_only=False)
    if not found.any():
        return None
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
    return None if form == PLAIN_NUMBER else form


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
        grouped = pc.all(pc.match_substring_regex(marked, _GROUPED % pattern)).as_py()
        if len(marked) and (attached or shorter) and grouped:  # ids of three digits each are a bag
            with_comma = mark != "," and pc.any(pc.match_substring(marked, ",")).as_py()
            return {"thousands": mark, **({"decimal": ","} if with_comma else {})}
    commas = pc.count_substring(digits, ",").to_numpy(zero_copy_only=False)
    if not commas.any():
        return {"thousands": "."} if pc.any(pc.greater(pc.count_substring(digits, "."), 1)).as_py() else {}
    several = pc.any(pc.match_substring_regex(digits, r"\..*,")).as_py()  # 1.234,50
    each_has_one = np.dot(commas == 1, rows) >= (1 - MOSTLY) * rows.sum()
    decimal = commas.max() == 1 and (several or semicolons or attached or each_has_one)
    return {"decimal": ","} if decimal else {}


SAMPLE_ROWS = 100_000
"""Number of rows looked at, from the start of the log."""
_WORDS = ("NA", "N/A", "n/a", "None", "none", "nil", "?")
"""Usual marks of a missing value that may be words of a person's, too."""
_CODE_OF_TWO = r"^[A-Z]{2}$"


@dataclass(frozen=True, eq=False)
class ColumnSample:
    """One column of the sample."""

    name: str
    raw: pa.Array
    complete: bool = True
    """Whether these are all rows of the log."""
    commas: bool = False
    """Whether semicolons separate the file's fields, as they do beside decimal commas."""

    @property
    def kind(self) -> pa.DataType:
        """Type that the file gives the column; text formats give bytes."""
        return self.raw.type

    @property
    def rows(self) -> int:
        """Number of rows of the sample."""
        return len(self.raw)

    @cached_property
    def _written(self) -> pa.DictionaryArray:
        """The values with all marks of missing ones but the empty text."""
        raw = self.raw.flatten() if is_list(self.kind) else self.raw
        if pa.types.is_nested(raw.type) or pa.types.is_null(raw.type):
            raw = pa.nulls(len(raw), pa.string())
        return coded(raw, ("",))

    @cached_property
    def not_missing(self) -> tuple[str, ...]:
        """Usual marks of a missing value that are values here: NA among codes of two letters, and words if other
        cells are empty, which shows how this column writes a missing value."""
        values = self._written.dictionary
        words = [mark for mark in _WORDS if pc.is_in(pa.array([mark]), values)[0].as_py()]
        others = values.filter(pc.invert(pc.is_in(values, pa.array(MISSING_MARKS))))
        if not words or not len(others):
            return ()
        codes = len(others) > 1 and pc.all(pc.match_substring_regex(others, _CODE_OF_TWO)).as_py()
        if codes and "NA" in words:
            return ("NA",)
        if not self._written.null_count or is_list(self.kind):
            return ()
        numbers = number_form(others, np.ones(len(others), dtype=np.int64), semicolons=self.commas)
        return tuple(words) if numbers is None else ()

    @property
    def words_missing(self) -> tuple[str, ...]:
        """Words that could be values, and are read as missing."""
        found = pc.is_in(pa.array(_WORDS), self._written.dictionary).to_pylist()
        return tuple(
            mark for mark, there in zip(_WORDS, found, strict=True) if there and mark not in self.not_missing
        )

    @cached_property
    def _coded(self) -> pa.DictionaryArray:
        marks = [mark for mark in MISSING_MARKS if mark not in self.not_missing]
        return coded(self._written, marks)

    @property
    def codes(self) -> NDArray[np.int32]:
        """Place of each row's value among `values` (of a list column, of each element's), -1 if missing."""
        return codes_of(self._coded)

    @property
    def values(self) -> pa.Array:
        """Distinct values as clean text, in the order of their first row (of a list column, its elements)."""
        return self._coded.dictionary

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of rows of each distinct value."""
        codes = self._coded.indices.drop_null().to_numpy(zero_copy_only=False)
        return np.bincount(codes, minlength=len(self.values)).astype(np.int64)

    @property
    def distinct(self) -> int:
        """Number of distinct values."""
        return len(self.values)

    @property
    def known(self) -> int:
        """Number of rows that are not missing."""
        return int(self.counts.sum())

    @property
    def missing(self) -> int:
        """Number of rows without a value."""
        return self.raw.null_count if is_list(self.kind) else self.rows - self.known

    @property
    def numbers(self) -> NDArray[np.float64] | None:
        """The distinct values as numbers, NaN if they are none, or None for a column that is not one of
        numbers."""
        return self._as_numbers[0]

    @property
    def row_numbers(self) -> NDArray[np.float64]:
        """The number of each row (N) of a column of numbers, NaN if it has none."""
        assert self.numbers is not None
        found: NDArray[np.float64] = np.append(self.numbers, np.nan)[self.codes]
        return found

    @property
    def form(self) -> NumericColumn:
        """How its numbers are written."""
        return self._as_numbers[1]

    @cached_property
    def _as_numbers(self) -> tuple[NDArray[np.float64] | None, NumericColumn]:
        if pa.types.is_nested(self.kind):
            return None, PLAIN_NUMBER
        return number_form(self.values, self.counts, semicolons=self.commas) or (None, PLAIN_NUMBER)

    @property
    def integral(self) -> bool:
        """Whether all numbers are whole."""
        return self.numbers is not None and not np.any(self.numbers[np.isfinite(self.numbers)] % 1)

    @property
    def nearly_unique(self) -> bool:
        """Whether almost every row has a value of its own."""
        return self.known >= 20 and self.distinct > 0.98 * self.known

    @property
    def constant(self) -> bool:
        """Whether the column tells nothing: one value in all rows, or none at all."""
        return self.distinct == 0 or (self.distinct == 1 and self.missing == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The first rows of a log, by column."""

    columns: dict[str, ColumnSample]
    rows: int
    complete: bool
    """Whether this is the whole log."""


def draw_sample(
    log: RawLog, columns: Sequence[str], *, skip_bad_rows: bool, limit: int = SAMPLE_ROWS
) -> Sample:
    """Reads the first rows of a log (whole batches, until there are `limit` rows).

    What the names of folders hold is of all files, as days and countries do not vary within the first.
    """
    batches: list[pa.RecordBatch] = []
    rows, complete = 0, True
    for batch in read_batches(log, columns, BadRows(skip=skip_bad_rows), marks=("",)):
        if rows >= limit:
            complete = False
            break
        batches.append(batch.table)
        rows += batch.table.num_rows
    commas = all(file.dialect.delimiter == ";" for file in log.files)
    arrays = {name: [batch.column(name) for batch in batches] for name in columns}
    in_folders = set.intersection(*(set(file.partition) for file in log.files))
    if not complete:
        # a folder's values in the order of the files, each in as many rows as its file has of the bytes
        sizes = [file.path.stat().st_size for file in log.files]
        counts = [max(1, round(rows * size / sum(sizes))) for size in sizes]
        pairs = [*zip(log.files, counts, strict=True)]
        for name in in_folders.intersection(columns):
            arrays[name] = [repeated(file.partition[name], count) for file, count in pairs]
    return Sample(
        columns={
            name: ColumnSample(name, _joined(name, parts), complete, commas)
            for name, parts in arrays.items()
            if parts
        },
        rows=rows,
        complete=complete,
    )


def _joined(name: str, parts: Sequence[pa.Array]) -> pa.Array:
    """Returns the values of one column one after another. If types differ, such as whole numbers in one file
    and numbers in the next, because one is missing there, they are in a common type, else text.

    Raises:
        UserError: for lists in one file and single values in another.
    """
    parts = [part.dictionary_decode() if pa.types.is_dictionary(part.type) else part for part in parts]
    types = {part.type for part in parts if not pa.types.is_null(part.type)}
    try:
        common = pa.unify_schemas([pa.schema([(name, each)]) for each in types], promote_options="permissive")
        kind = common.field(name).type if types else pa.null()
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        kind = pa.list_(pa.string()) if all(map(is_list, types)) else pa.string()
    try:
        texts = kind == pa.string()
        return pa.concat_arrays([as_text(part) if texts else part.cast(kind, safe=False) for part in parts])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        held = " and ".join(sorted(map(str, types)))
        raise UserError(f"column {name!r} holds {held} in files of one log: write it alike in all.") from None
