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
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from dhen.errors import UserError

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""Arrow's names of the compressions that are read, by a file's first bytes."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""How Hive and Spark write a missing value into the name of a folder."""


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
    fields: tuple[str, ...]
    """Names of what a row of the file holds, in its order."""
    folder: Path | None = None
    """The folder that was named as the log, where the file itself was not."""
    delimiter: str = ","
    header_bytes: int = 0
    """Bytes of decompressed text before the first row of data."""
    header_lines: int = 0

    @property
    def name(self) -> str:
        """The file's path below the folder that was named; its own name where it was named itself."""
        return self.path.relative_to(self.folder).as_posix() if self.folder else self.path.name

    @property
    def partition(self) -> dict[str, str | None]:
        """Columns that the names of folders hold, as Hive and Spark write them (`dt=2026-11-02/part-0.parquet`),
        with the value that they have in all rows; a row's own column goes before."""
        pairs = (part.split("=", 1) for part in self.name.split("/")[:-1] if part.find("=") > 0)
        values = {unquote(key): None if value == _NO_VALUE else unquote(value) for key, value in pairs}
        return {key: value for key, value in values.items() if key not in self.fields}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: a row's own, in the file's order, and those of its folders."""
        return (*self.fields, *self.partition)

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
            # lines end where Arrow's parser ends them, at carriage returns too
            lines = io.TextIOWrapper(stream, encoding="latin-1", newline="")
            records = records_of(lines, self.delimiter, quoting=self.quoting)
            try:
                found = next(itertools.islice(records, row, None), None)
            except csv.Error:
                found = None
        if found is None:  # what Arrow takes for rows is not what Python's parser does
            return f"{self.path}, row {row + 1}"
        return f"{self.path}, line {self.header_lines + found[0]}"


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

    def lacking(self) -> dict[str, str]:
        """Returns the columns that some of the files lack, each with the first file that does."""
        every = dict.fromkeys(name for file in self.files for name in file.columns)
        common = set(self.columns)
        left_out = (name for name in every if name not in common)
        return {name: next(file.name for file in self.files if name not in file.columns) for name in left_out}

    @property
    def name(self) -> str:
        """Name of the first file, or of the folder that holds several."""
        first = self.files[0]
        folder = first.folder or first.path.parent
        return folder.name if len(self.files) > 1 else first.path.name.split(".")[0]

    def describe(self) -> str:
        """Returns the log's name in words, for messages."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{more}"


def compression_of(head: bytes) -> str | None:
    """Returns Arrow's name of a file's compression, by its first bytes; None for a plain one."""
    return next((name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None)


def open_stream(path: Path) -> Any:
    """Opens the decompressed bytes of a file, as an Arrow input stream."""
    return pa.input_stream(str(path), compression=_compression(path))


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        return compression_of(file.read(max(map(len, COMPRESSIONS))))


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file; a compressed one is unpacked to an unnamed temporary file first."""
    try:
        parquet = pq.ParquetFile(_unpacked(path) if _compression(path) else path)
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
        first_line = number = number + 1
        if quoting and '"' in line:
            reader = csv.reader(itertools.chain([line], lines), delimiter=delimiter)
            fields = next(reader)
            number += reader.line_num - 1
        elif text := line.rstrip("\r\n"):
            fields = text.split(delimiter)
        else:
            continue
        yield first_line, number, fields
