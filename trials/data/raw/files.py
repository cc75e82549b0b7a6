"""The files of a log: where they are, how each is written, and how its bytes are read."""

from __future__ import annotations

import csv
import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dhen.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"


class Format(StrEnum):
    """How a log is written."""

    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    CRITEO = "criteo"
    AVAZU = "avazu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFile:
    """One file of a log."""

    path: Path
    format: Format
    columns: tuple[str, ...]
    """Names of the columns, in the file's order."""
    delimiter: str = ","
    header_bytes: int = 0
    """Bytes of decompressed text before the first row of data."""
    header_lines: int = 0

    @property
    def quoting(self) -> bool:
        """Whether quotes enclose fields (raw Criteo has none)."""
        return self.format is not Format.CRITEO

    def where(self, row: int) -> str:
        """Returns the place of a row (0 is the first row of data): its line, or its number in a Parquet file.

        Reads the file up to there, since blank lines and quoted line ends make lines differ from rows.
        """
        if self.format is Format.PARQUET:
            return f"{self.path}, row {row + 1}"
        with open_stream(self.path) as stream:
            stream.read(self.header_bytes)
            lines = io.TextIOWrapper(
                stream, encoding="latin-1", newline=""
            )  # ends lines where Arrow's parser does
            records = records_of(lines, self.delimiter, quoting=self.quoting)
            try:
                line, _, _ = next(itertools.islice(records, row, None))
            except csv.Error:
                return f"{self.path}, row {row + 1}"
        return f"{self.path}, line {self.header_lines + line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLog:
    """All files of a log, in order."""

    files: tuple[RawFile, ...]

    @property
    def format(self) -> Format:
        """Format of all the files."""
        return self.files[0].format

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that all files have, in the order of the first."""
        common = set.intersection(*(set(file.columns) for file in self.files))
        return tuple(name for name in self.files[0].columns if name in common)

    @property
    def name(self) -> str:
        """Name of the first file, or of the folder that holds several."""
        path = self.files[0].path
        return path.parent.name if len(self.files) > 1 else path.name.split(".")[0]

    def describe(self) -> str:
        """Returns the log's name in words, for messages."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{more}"


def open_stream(path: Path) -> Any:
    """Opens the decompressed bytes of a file, as an Arrow input stream."""
    with path.open("rb") as file:
        compression = "gzip" if file.read(2) == GZIP_MAGIC else None
    return pa.input_stream(str(path), compression=compression)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file; a compressed one is unpacked to an unnamed temporary file first."""
    try:
        with path.open("rb") as file:
            plain = file.read(2) != GZIP_MAGIC
        parquet = pq.ParquetFile(path if plain else _unpacked(path))
        parquet.schema_arrow.names  # noqa: B018, names that are no UTF-8 show here
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}).") from None
    return parquet


def _unpacked(path: Path) -> pa.NativeFile:
    with tempfile.NamedTemporaryFile() as copy, open_stream(path) as stream:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        return pa.OSFile(copy.name)


def records_of(
    lines: Iterator[str], delimiter: str, *, quoting: bool
) -> Iterator[tuple[int, int, list[str]]]:
    """Yields first line, last line (both from 1) and fields of each record; blank lines are no records."""
    number = 0
    for line in lines:
        first_line = number + 1
        if quoting and '"' in line:
            reader = csv.reader(itertools.chain([line], lines), delimiter=delimiter)
            fields = next(reader)
            number += reader.line_num
        else:
            number = first_line
            fields = line.rstrip("\r\n").split(delimiter)
        if fields != [""]:
            yield first_line, number, fields
