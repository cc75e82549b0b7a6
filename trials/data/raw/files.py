"""The files of a log: where they are, how each is written, and how its bytes are read."""

from __future__ import annotations

import codecs
import contextlib
import csv
import hashlib
import io
import itertools
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from dhen.atomic_write import write_atomically
from dhen.errors import UserError, listed
from dhen.values import Value, file_hash
from trials.data.log_schema import PLAIN_CSV, UNSAID, CsvDialect, GivenDialect

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""Arrow's names of the compressions that are read, by a file's first bytes."""
MOST_NAMED = 5
"""Number of files, or columns, that a sentence names."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""How Hive and Spark write a missing value into the name of a folder."""


class Format(StrEnum):
    """How a log is written."""

    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    CRITEO = "criteo"
    AVAZU = "avazu"


class FileFacts(Value):
    """What is known of a file's bytes once all of them were read."""

    sha256: str = ""
    escaped_at: int | None = None
    """Place of the first quote after a backslash in the decompressed text."""
    utf8: bool = True
    mixed_line_ends: bool = False


UNREAD = FileFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFile:
    """One file of a log."""

    path: Path
    format: Format
    fields: tuple[str, ...]
    """Names of what a row of the file holds, in its order."""
    folder: Path | None = None
    """The folder that was named as the log, if the file itself was not."""
    dialect: CsvDialect = PLAIN_CSV
    header_bytes: int = 0
    """Bytes of decompressed text before the first row of data."""
    header_lines: int = 0
    facts: FileFacts = UNREAD

    @property
    def name(self) -> str:
        """The file's path below the folder that was named; its own name if it was named itself."""
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
            records = records_of(lines, self.dialect)
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
    csv: GivenDialect = UNSAID
    """What was said of how its text is written, and what all files share that is not plain."""

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

    def notes(self) -> list[str]:
        """Returns what of its text is worth knowing: the dialect if it is not the plain one, and odd bytes."""
        by_note = defaultdict[str, list[str]](list)
        for file in self.files:
            if file.format is Format.CRITEO:
                continue
            if file.dialect != PLAIN_CSV:
                by_note[f"read with {file.dialect.described()}"].append(file.name)
            if not file.facts.utf8:
                by_note["values that are no UTF-8 are read as Latin-1"].append(file.name)
            if file.facts.mixed_line_ends:
                by_note["lines end in several ways, all of which count"].append(file.name)
        return [f"{listed(names, MOST_NAMED)}: {note}" for note, names in by_note.items()]

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


def open_stream(path: Path, raw: Any = None) -> Any:
    """Opens the decompressed bytes of a file, as an Arrow input stream; `raw`: a Python file that reads it."""
    source = str(path) if raw is None else pa.PythonFile(raw, mode="r")
    return pa.input_stream(source, compression=_compression(path))


def read_at(path: Path, place: int, size: int) -> bytes:
    """Returns so many of the decompressed bytes of a file from a place on, as far as there are."""
    with open_stream(path) as stream:
        while place > 0 and (skipped := stream.read(min(place, size))):
            place -= len(skipped)
        return bytes(stream.read(size))


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        return compression_of(file.read(max(map(len, COMPRESSIONS))))


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file; a compressed one is unpacked to an unnamed temporary file first."""
    try:
        if _compression(path):
            with tempfile.NamedTemporaryFile() as copy, open_stream(path) as stream:
                shutil.copyfileobj(stream, copy)
                copy.flush()
                parquet = pq.ParquetFile(pa.OSFile(copy.name))
        else:
            parquet = pq.ParquetFile(path)
        parquet.schema_arrow.names  # noqa: B018, names that are no UTF-8 show here
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}).") from None
    return parquet


def records_of(
    lines: Iterator[str], dialect: CsvDialect, *, strict: bool = False
) -> Iterator[tuple[int, int, list[str]]]:
    """Yields first line, last line (both from 1) and fields of each record; blank lines are no records.

    Raises:
        csv.Error: for what Python's parser takes for no record; `strict`: for text after a closing quote, too.
    """
    number = 0
    marks = [mark for mark in (dialect.quote, dialect.escape) if mark]
    for line in lines:
        first_line = number = number + 1
        if any(mark in line for mark in marks):
            reader = csv.reader(
                itertools.chain([line], lines),
                delimiter=dialect.delimiter,
                quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
                quotechar=dialect.quote or None,
                escapechar=dialect.escape or None,
                strict=strict,
            )
            fields = next(reader)
            number += reader.line_num - 1
        elif text := line.rstrip("\r\n"):
            fields = text.split(dialect.delimiter)
        else:
            continue
        yield first_line, number, fields


# What is known of files once they are read whole, such as hashes of their content.
#
# It is remembered by path, size and modification time, so that a log is read for it once.

_SETTLED_NS = 2_000_000_000
"""Age in ns below which a file may change again within the clock's resolution: its hash is not remembered."""
_CHUNK_BYTES = 1 << 20


def facts_of(files: Sequence[RawFile], memory: Path) -> list[FileFacts]:
    """Returns what is known of each file. What is remembered lies in a file below `memory`.

    Raises:
        UserError: for a file that cannot be read to its end.
    """
    store = memory / "file_hashes.json"
    remembered = _load(store)
    facts, fresh = [], {}
    for file in files:
        stat = file.path.stat()
        key = f"{file.path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        settled = time.time_ns() - stat.st_mtime_ns > _SETTLED_NS
        try:
            known = FileFacts.model_validate(remembered[key])
        except (KeyError, ValueError):  # of another version, or damaged
            known = _read(file)
            if settled:
                fresh[key] = known.to_dict()
        facts.append(known)
    if fresh:
        # of two writers at once one wins, and the other's files are read again next time
        with contextlib.suppress(OSError):  # remembering is a convenience
            store.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(store, json.dumps({**_load(store), **fresh}))
    return facts


class _Hashed(io.RawIOBase):
    """A file that is hashed while Arrow reads and decompresses it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def readable(self) -> bool:
        """It is, for Arrow."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes."""
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _read(file: RawFile) -> FileFacts:
    if file.format is Format.PARQUET:
        return FileFacts(sha256=file_hash(file.path))
    decoder = codecs.getincrementaldecoder("utf-8")()
    escaped_at, utf8, place, last = None, True, 0, b""
    line_ends: set[str] = set()
    try:
        with file.path.open("rb") as raw:
            hashed = _Hashed(raw)
            with open_stream(file.path, hashed) as stream:
                while True:
                    chunk = stream.read(_CHUNK_BYTES)
                    text = last + chunk  # what two chunks share is seen in the second
                    if escaped_at is None and (found := text.find(b'\\"')) >= 0:
                        escaped_at = place - len(last) + found
                    if len(line_ends) < 2:
                        pairs = text.count(b"\r\n") if b"\r" in text else 0
                        counts = {
                            "\r\n": pairs,
                            "\n": text.count(b"\n") - pairs - (last == b"\n"),
                            "\r": text.count(b"\r", 0, -1) - pairs,
                        }
                        line_ends |= {end for end, count in counts.items() if count}
                    try:
                        if utf8:
                            decoder.decode(chunk, final=not chunk)
                    except UnicodeDecodeError:
                        utf8 = False
                    if not chunk:
                        break
                    place, last = place + len(chunk), chunk[-1:]
                while hashed.read(_CHUNK_BYTES):  # bytes after the end of what was compressed
                    pass
                sha256 = hashed.digest.hexdigest()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file.path}: cannot be read to its end ({error}).") from None
    return FileFacts(sha256=sha256, escaped_at=escaped_at, utf8=utf8, mixed_line_ends=len(line_ends) > 1)


def _load(store: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(store.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # nothing remembered: the files are read again
