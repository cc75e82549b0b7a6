"""A bounded sample of each column: its distinct values, how often each occurs, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.log_schema import POINT, DecimalMark
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows, read_batches, repeated
from trials.data.raw.text import as_text, coded, is_list, numbers_of

SAMPLE_ROWS = 100_000
"""Number of rows looked at, from the start of the log."""
MOSTLY = 0.01
"""Fraction of values that may be no numbers in a column of numbers."""
_NO_THOUSANDS = r",(\d{0,2}|\d{4,})$|^[+-]?(0|\d{4})\d*,"
"""A comma that does not group thousands."""


@dataclass(frozen=True, eq=False)
class ColumnSample:
    """One column of the sample."""

    name: str
    raw: pa.Array
    complete: bool = True
    """Whether these are all rows of the log."""
    commas: bool = False
    """The file's fields are separated by semicolons, as they are where numbers have a decimal comma."""

    @property
    def kind(self) -> pa.DataType:
        """Type that the file gives the column; text formats give bytes."""
        return self.raw.type

    @property
    def rows(self) -> int:
        """Number of rows of the sample."""
        return len(self.raw)

    @cached_property
    def _coded(self) -> pa.DictionaryArray:
        raw = self.raw.flatten() if is_list(self.kind) else self.raw
        return coded(raw.cast(pa.string()) if pa.types.is_null(raw.type) else raw)

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
        """The distinct values as numbers, or None where they are none.

        A few that are no numbers (NaN here) do not make a column text: when the log is prepared they raise an
        error that names their line.
        """
        return self._as_numbers[0]

    @property
    def decimal(self) -> DecimalMark:
        """The mark before the decimals of its numbers."""
        return self._as_numbers[1]

    @cached_property
    def _as_numbers(self) -> tuple[NDArray[np.float64] | None, DecimalMark]:
        comma = self.commas and pc.any(pc.match_substring_regex(self.values, _NO_THOUSANDS)).as_py()
        marks: tuple[DecimalMark, ...] = (POINT, ",") if comma else (POINT,)
        for mark in marks:
            numbers, unreadable = numbers_of(self.values, mark)
            if np.dot(unreadable, self.counts) <= MOSTLY * self.known and np.isfinite(numbers).any():
                return numbers, mark
        return None, POINT

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
    for batch in read_batches(log, columns, BadRows(skip=skip_bad_rows)):
        if rows >= limit:
            complete = False
            break
        batches.append(batch.table)
        rows += batch.table.num_rows
    commas = all(file.dialect.delimiter == ";" for file in log.files)
    arrays = {name: [batch.column(name) for batch in batches] for name in columns}
    if not complete:
        arrays |= {name: _over_all_files(log, name, rows) for name in _in_folders(log) if name in columns}
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
    """Returns the values of one column one after another. Where types differ, such as whole numbers in one file
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


def _in_folders(log: RawLog) -> set[str]:
    return set.intersection(*(set(file.partition) for file in log.files))


def _over_all_files(log: RawLog, name: str, rows: int) -> list[pa.Array]:
    """A folder's values in the order of the files, each in as many of the rows as its file has of the bytes."""
    sizes = [file.path.stat().st_size for file in log.files]
    counts = [max(1, round(rows * size / sum(sizes))) for size in sizes]
    return [repeated(file.partition[name], count) for file, count in zip(log.files, counts, strict=True)]
