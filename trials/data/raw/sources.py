"""Finds out of which files a log consists and how they are written, from names and content.

Text formats have a header line, except raw Criteo, whose columns are known. How a file is compressed is seen
from its first bytes, whatever it is called.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa

from dhen.errors import UserError, unknown_name
from trials.data.raw.files import (
    COMPRESSIONS,
    Format,
    RawFile,
    RawLog,
    compression_of,
    open_parquet,
    open_stream,
    records_of,
)
from trials.data.raw.text import from_bytes

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
AVAZU_COLUMNS = ("hour", "C1", "banner_pos", "site_id", "app_id", "device_id", "C14", "C21")
"""Names by which an Avazu header is recognised (its test file has no `click`)."""
HEAD_BYTES = 1 << 20
"""Bytes read from the start of a text file to learn how it is written; a header line must fit in."""
CHUNK_BYTES = 1 << 16
"""Bytes unpacked at a time; what follows the last whole chunk of a file's beginning is not counted."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SUFFIXES = {".csv": Format.CSV, ".tsv": Format.TSV, ".parquet": Format.PARQUET, ".pq": Format.PARQUET}
_CRITEO_FIELDS = re.compile(r"(?:[01]\t)?(?:-?\d*\t){13}(?:[0-9a-f]{0,8}\t){25}[0-9a-f]{0,8}")
_UNREAD = {
    b"PK\x03\x04": "a ZIP archive, which is not read: unpack it, or save a spreadsheet as CSV",
    b"\xfd7zXZ\x00": "compressed by xz, which is not read: unpack it (xz -d)",
}
"""What is said of files that begin so."""
_FROM_JSON_LINES = (
    "Where each line is an object, this makes a Parquet file of it, nested keys as columns: "
    "python -c 'import sys, pyarrow.json as j, pyarrow.parquet as p; "
    'p.write_table(j.read_json(sys.argv[1]).flatten(), "log.parquet")\' FILE'
)


def open_log(sources: Sequence[Path], log_format: str | None = None) -> RawLog:
    """Finds the files, their format and their columns.

    Raises:
        UserError: for missing or empty files, several formats, an unknown format, a file without header,
            or names used twice in a header.
    """
    if log_format is not None and log_format not in list(Format):
        raise unknown_name("format", log_format, [str(format_name) for format_name in Format])
    files = tuple(
        replace(_open_file(path, Format(log_format) if log_format else None), folder=folder)
        for folder, path in chain.from_iterable(_files_of(Path(source)) for source in sources)
    )
    if not files:
        raise UserError("no log was given: name a file, several files, or a folder.")
    formats = Counter(file.format for file in files)
    if len(formats) > 1:
        examples = ", ".join(f"{file.path.name} is {file.format}" for file in files[:5])
        raise UserError(
            f"the files of a log must have one format, received {examples}; say which with format."
        )
    return RawLog(files=files)


def _files_of(source: Path) -> list[tuple[Path | None, Path]]:
    """The files at a path with the folder that it is, if it is one; those that begin with `.` or `_` are of
    whoever wrote the folder, such as Spark's `_SUCCESS`."""
    if source.is_file():
        return [(None, source)]
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder.")
    files = sorted(
        path
        for path in source.rglob("*")
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(source).parts)
    )
    if not files:
        raise UserError(f"{source}: the folder holds no files.")
    return [(source, path) for path in files]


def _open_file(path: Path, requested: Format | None) -> RawFile:
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    try:
        with open_stream(path) as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    file_format = requested or _detect(path, head)
    if file_format is Format.PARQUET:
        names = tuple(open_parquet(path).schema_arrow.names)
        return RawFile(path=path, format=file_format, fields=_without_doubles(path, names))
    if head.startswith(_UTF16):
        raise UserError(f"{path}: the text is UTF-16; convert it to UTF-8, e.g. with iconv.")
    if file_format is Format.CRITEO:
        return _criteo_file(path, head)
    return _file_with_header(path, head, file_format)


def _detect(path: Path, head: bytes) -> Format:
    if head.startswith(b"PAR1"):
        return Format.PARQUET
    if b"\0" in head[:4096] and not head.startswith(_UTF16):
        told = next(
            (words for magic, words in _UNREAD.items() if head.startswith(magic)), "neither text nor Parquet"
        )
        raise UserError(
            f"{path}: {told}. Known formats: {', '.join(Format)}, plain or by {', '.join(COMPRESSIONS.values())}."
        )
    if _looks_like_criteo(head):
        return Format.CRITEO
    first_line = head.removeprefix(codecs.BOM_UTF8).split(b"\n", 1)[0].decode("latin-1").strip("\r")
    if set(AVAZU_COLUMNS) <= set(first_line.split(",")):
        return Format.AVAZU
    suffixes = [suffix for suffix in path.suffixes if suffix in _SUFFIXES]
    if suffixes and _SUFFIXES[suffixes[-1]] is not Format.PARQUET:
        return _SUFFIXES[suffixes[-1]]
    return Format.TSV if "\t" in first_line else Format.CSV


def _looks_like_criteo(head: bytes) -> bool:
    """Tells whether the first line fits the pattern, and so do most of the next ones (a log may hold bad rows)."""
    lines = head.decode("latin-1").split("\n")[:20]
    whole_lines = [line.rstrip("\r") for line in (lines[:-1] or lines) if line.strip()]
    fits = [bool(_CRITEO_FIELDS.fullmatch(line)) for line in whole_lines]
    return bool(fits) and fits[0] and sum(fits) * 2 > len(fits)


def _criteo_file(path: Path, head: bytes) -> RawFile:
    width = head.split(b"\n", 1)[0].count(b"\t") + 1
    if width not in (39, 40):
        raise UserError(
            f"{path}: a Criteo log has 40 tab-separated fields (39 without label) and no header, "
            f"the first line has {width}."
        )
    return RawFile(path=path, format=Format.CRITEO, fields=CRITEO_COLUMNS[40 - width :], delimiter="\t")


def _file_with_header(path: Path, head: bytes, file_format: Format) -> RawFile:
    bom = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    lines = list(io.StringIO(head[bom:].decode("latin-1"), newline="\n"))
    header = next((line for line in lines if line.strip("\r\n")), "")
    if header.lstrip().startswith(("{", "[{")):
        raise UserError(f"{path}: the text is JSON, which is not read. {_FROM_JSON_LINES}")
    delimiter = (
        "\t"
        if file_format is Format.TSV
        else next((character for character in ",;\t|" if character in header), ",")
    )
    try:
        record = next(records_of(iter(lines), delimiter, quoting=True), None)
    except csv.Error as error:
        raise UserError(f"{path}: the header line cannot be read: {error}.") from None
    if record is None:
        raise UserError(f"{path}: the file holds no header and no rows.")
    _, height, fields = record
    if '"' not in header and any("\r" in field for field in fields):
        raise UserError(
            f"{path}: lines end with carriage returns alone; convert them, e.g. with tr '\\r' '\\n'."
        )
    names = [from_bytes(field.encode("latin-1")).strip() for field in fields]
    return RawFile(
        path=path,
        format=file_format,
        fields=_checked_names(path, names),
        delimiter=delimiter,
        header_bytes=bom + sum(len(line) for line in lines[:height]),
        header_lines=height,
    )


def _checked_names(path: Path, names: list[str]) -> tuple[str, ...]:
    names = [name or f"column_{i}" for i, name in enumerate(names, start=1)]
    if sum(bool(re.fullmatch(r"[+-]?\d+(\.\d+)?", name)) for name in names) * 2 > len(names):
        raise UserError(
            f"{path}: there seems to be no header line, the first line is {', '.join(names[:8])} ..."
        )
    return _without_doubles(path, tuple(names))


def _without_doubles(path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{path}: it names {', '.join(map(repr, twice))} more than once; rename them.")
    return names


def estimate_rows(log: RawLog) -> int:
    """Estimates how many rows a log has: exact for Parquet, from the first MiB of each text file."""
    return sum(_estimate_file_rows(file) for file in log.files)


def _estimate_file_rows(file: RawFile) -> int:
    if file.format is Format.PARQUET:
        return int(open_parquet(file.path).metadata.num_rows)
    size = file.path.stat().st_size
    with file.path.open("rb") as raw:
        head = raw.read(HEAD_BYTES)
    text = _unpacked(head)
    return max(1, round(text.count(b"\n") * size / len(head)) - file.header_lines)


def _unpacked(head: bytes) -> bytes:
    """The text of a file's beginning, as far as it goes."""
    if (compression := compression_of(head)) is None:
        return head
    text = bytearray()
    with contextlib.suppress(OSError):  # a part of a compressed file ends too soon
        stream = pa.CompressedInputStream(pa.py_buffer(head), compression)
        while chunk := stream.read(CHUNK_BYTES):
            text += chunk
    return bytes(text)
