"""What is known of files once they are read whole, such as hashes of their content.

It is remembered by path, size and modification time, so that a log is read for it once.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from dhen.fingerprint import file_hash
from trials.data.raw.files import FileFacts, Format, RawFile, open_stream

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
        key, settled = _key(file.path)
        try:
            known = FileFacts.model_validate(remembered[key])
        except (KeyError, ValueError):  # of another version, or damaged
            known = _read(file)
            if settled:
                fresh[key] = known.to_dict()
        facts.append(known)
    if fresh:
        _save(store, {**_load(store), **fresh})
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


def _key(path: Path) -> tuple[str, bool]:
    """Returns the key by which a file is remembered, and whether it may be."""
    stat = path.stat()
    return (
        f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}",
        time.time_ns() - stat.st_mtime_ns > _SETTLED_NS,
    )


def _load(store: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(store.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # nothing remembered: the files are read again


def _save(store: Path, facts: dict[str, Any]) -> None:
    """Writes the facts atomically; of two writers at once one wins, and the other's files are read again next
    time."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(store, json.dumps(facts))
    except OSError:
        pass  # remembering is a convenience
