"""Raw batches of a log, streamed in its order: text in chunks of bytes, Parquet in batches of rows."""

from __future__ import annotations

import io
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.log_schema import MISSING_MARKS, CsvDialect
from trials.data.raw.columns import from_bytes, plain
from trials.data.raw.files import Format, RawFile, RawLog, open_parquet, open_stream

BLOCK_BYTES = 8 << 20
"""Bytes of text per batch: large enough that a column's distinct values are few beside its rows."""
PARQUET_ROWS = 32_768
"""Rows of a Parquet file per batch."""
BYTES_AS_CHARACTERS = "latin-1"
"""Encoding in which each byte is a character."""
_QUOTES_AS_TEXT = "If quotes are part of the text, give csv.quote= (nothing behind it)."
RAGGED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
"""How Arrow's parser says that a row has a wrong number of fields."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBatch:
    """Consecutive rows of one file: text as bytes, Parquet as it is typed."""

    table: pa.RecordBatch
    source: RawFile | None = None
    """File that the batch is from; None if it comes from no file."""
    first_row: int = 0
    """Number of the batch's first row in the file; skipped rows are not counted."""

    def where(self, row: int) -> str:
        """Returns the file and line of a row of this batch (exact as long as no row was skipped)."""
        return self.source.where(self.first_row + row) if self.source else f"row {row + 1}"


class BadRows:
    """The treatment of rows that cannot be used: raise an error, or count them and go on."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.ragged = 0
        self.swallowed = 0
        """Number of line ends within rows that were left out: a quote that is never closed takes the lines after
        it."""
        self.unlabeled = 0
        self.weightless = 0
        self.unreadable: Counter[str] = Counter()

    def add_unreadable(
        self, batch: RawBatch, name: str, kind: str, bad: NDArray[np.bool_], *, most: float = 0.0
    ) -> None:
        """Counts values that are no `kind`, to be treated as missing, or raises a UserError with the first if more
        than a share `most` of the batch are."""
        if not bad.any():
            return
        if not self.skip and bad.mean() > most:
            row = int(np.argmax(bad))
            value = batch.table.column(name)[row].as_py()
            text = from_bytes(value) if isinstance(value, bytes) else value
            remedy = (
                "Mend the row, give the column another role in schema.yaml, or count such values as missing with "
                "skip_bad_rows, if the command takes it."
                if batch.source
                else "Mend the value, or leave it out if it is not known."
            )
            raise UserError(
                f"{batch.where(row)}: column {name!r} holds {text!r}, which is no {kind}. {remedy}"
            )
        self.unreadable[name] += int(bad.sum())

    def notes(self) -> list[str]:
        """Returns what was skipped, in words."""
        counts = {
            "rows skipped for a wrong number of fields": self.ragged,
            "further lines within these, which a quote that is not closed takes": self.swallowed,
            "rows skipped for want of a label or a weight": self.unlabeled,
            "rows left out, whose weight is 0": self.weightless,
            **{f"unreadable values of {name!r}, taken for missing": n for name, n in self.unreadable.items()},
        }
        return [f"{reason}: {count:,}" for reason, count in counts.items() if count]


def read_batches(
    log: RawLog, columns: Sequence[str], bad_rows: BadRows, marks: Sequence[str] = MISSING_MARKS
) -> Iterator[RawBatch]:
    """Yields all rows of the log in order, the named columns only, the next batch being read meanwhile.

    Args:
        log: the log.
        columns: the columns that are wanted.
        bad_rows: the treatment of rows that cannot be used.
        marks: text that is null in every column, which the parser finds sooner than later steps do.

    Raises:
        UserError: for a column that a file lacks, a row with a wrong number of fields (unless skipped), or
            a file that cannot be read to its end.
    """
    return ahead(_read(log, columns, bad_rows, marks))


def ahead(items: Iterator[T], count: int = 1) -> Iterator[T]:
    """Yields the same items, so many of which are computed by a thread while the one before them is used."""
    thread = ThreadPoolExecutor(1)
    try:
        waiting = deque(thread.submit(next, items, None) for _ in range(count))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, items, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


def _read(log: RawLog, columns: Sequence[str], bad_rows: BadRows, marks: Sequence[str]) -> Iterator[RawBatch]:
    for file in log.files:
        absent = [name for name in columns if name not in file.columns]
        if absent:
            raise UserError(
                f"{file.path}: the columns {', '.join(map(repr, absent))} are missing; "
                f"the file has {', '.join(file.columns)}."
            )
        fields = [name for name in columns if name in file.fields]
        first_row = 0
        is_parquet = file.format is Format.PARQUET
        tables = _read_parquet(file, fields) if is_parquet else _read_text(file, fields, bad_rows, marks)
        for table in tables:
            for name, value in file.partition.items():
                if name in columns:
                    table = table.append_column(name, repeated(value, len(table)))
            yield RawBatch(table=table.select(columns), source=file, first_row=first_row)
            first_row += table.num_rows


def repeated(value: str | None, rows: int) -> pa.Array:
    """Returns the column of so many rows that have one value, which the name of a folder holds."""
    if value is None:
        return pa.nulls(rows, pa.binary())
    return pa.repeat(pa.scalar(os.fsencode(value), pa.binary()), rows)


def _read_parquet(file: RawFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with open_parquet(file.path) as parquet:
        try:
            for table in parquet.iter_batches(PARQUET_ROWS, columns=list(columns)):
                arrays = [plain(column) for column in table.columns]
                yield pa.RecordBatch.from_arrays(arrays, table.schema.names)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file.path}: cannot be read to its end ({error}).") from None


class EscapesAlone(io.RawIOBase):
    r"""A text in which every escape character is one to Arrow's parser, which drops it before any character: those
    before letters are doubled, so that `\N` is still a missing value and `a\b` is not `ab`."""

    def __init__(self, stream: Any, dialect: CsvDialect) -> None:
        """Takes an open stream of bytes."""
        escape = re.escape(dialect.escape)
        marks = re.escape("".join((dialect.escape, dialect.quote, dialect.delimiter, "\r\n")))
        self._pattern = re.compile(f"({escape}[{marks}])|{escape}".encode())
        self._escape, self._stream = dialect.escape.encode(), stream
        self._read, self._rest = bytearray(), b""

    def readable(self) -> bool:
        """It is, for Arrow."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes of the text; none at its end."""
        while len(self._read) < size and (chunk := self._stream.read(size)):
            text = self._rest + chunk
            escapes = len(text) - len(text.rstrip(self._escape))
            end = len(text) - escapes % 2  # the last one may escape what comes next
            self._read += self._pattern.sub(lambda found: found[1] or 2 * self._escape, text[:end])
            self._rest = text[end:]
        if len(self._read) < size:
            self._read, self._rest = self._read + self._rest, b""
        given = bytes(self._read[:size])
        del self._read[:size]
        return given


def _read_text(
    file: RawFile, columns: Sequence[str], bad_rows: BadRows, marks: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    def leave_out(row: pacsv.InvalidRow) -> str:
        bad_rows.ragged += 1
        bad_rows.swallowed += row.text.rstrip("\r\n").count("\n")
        return "skip"

    parse = pacsv.ParseOptions(
        delimiter=file.dialect.delimiter,
        quote_char=file.dialect.quote or False,
        escape_char=file.dialect.escape or False,
        newlines_in_values=bool(file.dialect.quote or file.dialect.escape),
        invalid_row_handler=leave_out if bad_rows.skip else None,
    )
    fields = dict.fromkeys([*columns, file.fields[-1]])  # the last one shows whether all quotes were closed
    convert = pacsv.ConvertOptions(
        column_types=dict.fromkeys(fields, pa.binary()),
        include_columns=list(fields),
        null_values=list(marks),
        strings_can_be_null=True,
    )
    read = pacsv.ReadOptions(
        column_names=list(file.fields),
        block_size=BLOCK_BYTES,
        use_threads=False,  # only then does the parser know the number of a row; conversion is parallel elsewhere
        encoding=BYTES_AS_CHARACTERS if bad_rows.skip else "utf-8",  # the handler is called for UTF-8 alone
    )
    try:
        with open_stream(file.path) as stream:
            stream.read(file.header_bytes)
            last_column = pa.array([])
            text = EscapesAlone(stream, file.dialect) if file.dialect.escape else stream
            for table in pacsv.open_csv(text, read, parse, convert):
                last_column = table.column(file.fields[-1])
                if bad_rows.skip:
                    table = pa.RecordBatch.from_arrays([*map(_own_bytes, table.columns)], table.column_names)
                yield table.select(columns)
        if len(last_column) and last_column[-1].is_valid and last_column[-1].as_py().endswith(b"\n"):
            # a quote that was left open swallows the rest of the file, the end of its last line included
            raise UserError(
                f"{file.path}: a quote in column {file.fields[-1]!r} is never closed. {_QUOTES_AS_TEXT}"
            )
    except (pa.ArrowException, OSError) as error:
        if "Empty CSV" in str(error):
            return
        if (found := RAGGED.search(str(error))) is not None:
            row, expected, actual = map(int, found.groups())
            raise UserError(
                f"{file.where(row - 1)}: expected {expected} fields, found {actual}. "
                "Mend the row, or leave such rows out with skip_bad_rows, if the command takes it."
            ) from None
        swallows = "straddl" in str(error) or "out of sync" in str(error)
        remedy = f" Perhaps a quoted field is never closed. {_QUOTES_AS_TEXT}" if swallows else ""
        raise UserError(f"{file.path}: cannot be read to its end ({error}).{remedy}") from None


def _own_bytes(column: pa.Array) -> pa.Array:
    """Returns fields in the file's own bytes, each of which was read as a character."""
    text = column.cast(pa.string())
    if pc.all(pc.string_is_ascii(text)).as_py() is not False:
        return column
    values = (None if value is None else value.encode(BYTES_AS_CHARACTERS) for value in text.to_pylist())
    return pa.array(values, pa.binary())
