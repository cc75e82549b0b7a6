"""Finds out of which files a log consists and how they are written, from names and content.

Text formats have a header line, except raw Criteo, whose columns are known. How a file is compressed is seen
from its first bytes, whatever it is called.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from dhen.errors import UserError, unknown_name
from trials.data.log_schema import PLAIN_CSV, UNSAID, CsvDialect, GivenDialect
from trials.data.raw.columns import from_bytes
from trials.data.raw.dialect import escapes, find_dialect
from trials.data.raw.files import (
    COMPRESSIONS,
    FileFacts,
    Format,
    RawFile,
    RawLog,
    compression_of,
    facts_of,
    open_parquet,
    open_stream,
    read_at,
)
from trials.store.user_cache import user_cache

CRITEO_COLUMNS = ("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
AVAZU_COLUMNS = ("hour", "C1", "banner_pos", "site_id", "app_id", "device_id", "C14", "C21")
"""Names by which an Avazu header is recognised (its test file has no `click`)."""
HEAD_BYTES = 1 << 20
"""Bytes read from the start of a text file to learn how it is written; a header line must fit in."""
CHUNK_BYTES = 1 << 16
"""Bytes unpacked at a time; what follows the last whole chunk of a file's beginning is not counted."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WITH_DIALECT = (Format.CSV, Format.TSV, Format.AVAZU)
_PLAIN = set(PLAIN_CSV.to_dict().items())
_CRITEO = CsvDialect(delimiter="\t", quote="", header=False)
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


def open_log(
    sources: Sequence[Path],
    log_format: str | None = None,
    csv: GivenDialect = UNSAID,
    usual: GivenDialect | None = None,
    *,
    whole: bool = True,
) -> RawLog:
    """Finds the files, their format, their dialects and their columns.

    Args:
        sources: files and folders.
        log_format: the format; None: found out.
        csv: what is said of how text files are written.
        usual: what a schema says of it that was made for other files too, and decides if several readings are
            possible; None if there is no schema.
        whole: whether files are read whole for it, once, for their hashes and for what is odd late in them.

    Raises:
        UserError: for missing or empty files, several formats, an unknown format, a file that may be read in
            several ways.
    """
    if log_format is not None and log_format not in list(Format):
        raise unknown_name("format", log_format, [str(format_name) for format_name in Format])
    requested = Format(log_format) if log_format else None
    if requested is Format.TSV and csv.delimiter is None:
        csv = csv.replace(delimiter="\t")
    files: list[RawFile] = []
    for source in map(Path, sources):
        folder, paths = (None, [source]) if source.is_file() else (source, list[Path]())
        if folder is not None:
            if not folder.is_dir():
                raise UserError(f"{source}: no such file or folder.")
            for path in sorted(folder.rglob("*")):
                # names that begin with `.` or `_` belong to the writer of the folder, such as Spark's `_SUCCESS`
                if path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts):
                    paths.append(path)
            if not paths:
                raise UserError(f"{source}: the folder holds no files.")
        for path in paths:
            files.append(replace(_open_file(path, requested, csv, usual, files[-1:]), folder=folder))
    if not files:
        raise UserError("no log was given: name a file, several files, or a folder.")
    if len({Format.CSV if file.format is Format.TSV else file.format for file in files}) > 1:
        examples = ", ".join(f"{file.path.name} is {file.format}" for file in files[:5])
        raise UserError(
            f"the files of a log must have one format, received {examples}; say which with format."
        )
    if whole:
        facts = facts_of(files, user_cache())
        files = [_whole(file, known, csv) for file, known in zip(files, facts, strict=True)]
    texts = [file.dialect.to_dict().items() for file in files if file.format in _WITH_DIALECT]
    shared = set.intersection(*map(set, texts)) if texts else set()
    return RawLog(files=tuple(files), csv=csv.over(GivenDialect(**dict(shared - _PLAIN))))


def _whole(file: RawFile, facts: FileFacts, csv: GivenDialect) -> RawFile:
    """The file with what is known of all of it: quotes may be escaped late in it alone."""
    dialect = file.dialect
    unknown = csv.escape is None and not dialect.escape and file.format in _WITH_DIALECT
    if facts.escaped_at is not None and unknown:
        around = read_at(file.path, max(0, facts.escaped_at - CHUNK_BYTES), 2 * CHUNK_BYTES)
        lines = _lines(around, whole=False)[facts.escaped_at > CHUNK_BYTES :]
        if escapes(lines, dialect):
            dialect = dialect.replace(escape="\\")
    return replace(file, facts=facts, dialect=dialect)


def _open_file(
    path: Path,
    requested: Format | None,
    csv: GivenDialect,
    usual: GivenDialect | None,
    before: Sequence[RawFile],
) -> RawFile:
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty.")
    try:
        with open_stream(path) as stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error}).") from None
    if requested is not None:
        file_format = requested
    elif head.startswith(b"PAR1"):
        file_format = Format.PARQUET
    elif b"\0" in head[:4096] and not head.startswith(_UTF16):
        told = next((words for magic, words in _UNREAD.items() if head.startswith(magic)), None)
        raise UserError(
            f"{path}: {told or 'neither text nor Parquet'}. Known formats: {', '.join(Format)}, plain or by "
            f"{', '.join(COMPRESSIONS.values())}."
        )
    else:
        # the first line fits the pattern, and so do most of the next ones (a log may hold bad rows)
        lines = head.decode("latin-1").split("\n")[:20]
        fits = [
            bool(_CRITEO_FIELDS.fullmatch(line.rstrip("\r")))
            for line in (lines[:-1] or lines)
            if line.strip()
        ]
        is_criteo = not csv.said and bool(fits) and fits[0] and sum(fits) * 2 > len(fits)
        file_format = Format.CRITEO if is_criteo else Format.CSV
    if file_format is Format.PARQUET:
        names = tuple(open_parquet(path).schema_arrow.names)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{path}: it names {', '.join(map(repr, twice))} more than once; rename them.")
        return RawFile(path=path, format=file_format, fields=names)
    if head.startswith(_UTF16):
        raise UserError(f"{path}: the text is UTF-16; convert it to UTF-8, e.g. with iconv.")
    if file_format is not Format.CRITEO:
        return _text_file(path, head, requested, csv, usual, before)
    width = head.split(b"\n", 1)[0].count(b"\t") + 1
    if width not in (39, 40):
        raise UserError(
            f"{path}: a Criteo log has 40 tab-separated fields (39 without label) and no header, "
            f"the first line has {width}."
        )
    return RawFile(path=path, format=file_format, fields=CRITEO_COLUMNS[40 - width :], dialect=_CRITEO)


def _text_file(
    path: Path,
    head: bytes,
    requested: Format | None,
    csv: GivenDialect,
    usual: GivenDialect | None,
    before: Sequence[RawFile],
) -> RawFile:
    bom = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    lines = _lines(head[bom:], whole=len(head) < HEAD_BYTES)
    first = next((line for line in lines if line.strip("\r\n")), None)
    if first is None:
        raise UserError(f"{path}: the file holds no header and no rows.")
    if first.lstrip().startswith(("{", "[{")):
        raise UserError(f"{path}: the text is JSON, which is not read. {_FROM_JSON_LINES}")
    if all(line.endswith("\r") for line in lines[:-1]) and b"\n" not in head and len(lines) > 1:
        raise UserError(
            f"{path}: lines end with carriage returns alone; convert them, e.g. with tr '\\r' '\\n'."
        )
    for other in before:  # most files of a log begin alike
        if other.dialect.header and head.startswith(read_at(other.path, 0, other.header_bytes)):
            return replace(other, path=path)
    dialect, fields, header_lines = find_dialect(path, lines, csv, usual)
    names = _names([from_bytes(field.encode("latin-1")).strip() for field in fields])
    file_format = requested or (Format.TSV if dialect.delimiter == "\t" else Format.CSV)
    return RawFile(
        path=path,
        format=Format.AVAZU if requested is None and set(AVAZU_COLUMNS) <= set(names) else file_format,
        fields=names,
        dialect=dialect,
        header_bytes=bom + sum(map(len, lines[:header_lines])),
        header_lines=header_lines,
    )


def _lines(text: bytes, *, whole: bool) -> list[str]:
    """Lines as Arrow ends them, each byte a character; without the last one unless the text is whole."""
    lines = list(io.StringIO(text.decode("latin-1"), newline=""))
    return lines if whole or len(lines) < 2 else lines[:-1]


def _names(fields: Sequence[str]) -> tuple[str, ...]:
    """Names of columns: `column_3` for the third one without a name, `x.1` for a second `x`, as pandas has it."""
    names: list[str] = []
    for place, field in enumerate(fields, start=1):
        own = name = field or f"column_{place}"
        number = 0
        while name in names or (number and name in fields):
            number += 1
            name = f"{own}.{number}"
        names.append(name)
    return tuple(names)


def estimate_rows(log: RawLog) -> int:
    """Estimates how many rows a log has: exact for Parquet, from the first MiB of each text file."""
    rows = 0
    for file in log.files:
        if file.format is Format.PARQUET:
            rows += int(open_parquet(file.path).metadata.num_rows)
            continue
        with file.path.open("rb") as raw:
            head = raw.read(HEAD_BYTES)
        lines = _unpacked(head).count(b"\n") * file.path.stat().st_size / len(head)
        rows += max(1, round(lines) - file.header_lines)
    return rows


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
