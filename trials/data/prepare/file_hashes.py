"""Content hashes of files, remembered by path, size and modification time: a log is read for them once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from dhen.atomic_write import write_atomically
from dhen.fingerprint import file_hash

_SETTLED_NS = 2_000_000_000
"""Age in ns below which a file may change again within the clock's resolution: its hash is not remembered."""


def hash_files(paths: Sequence[Path], memory: Path) -> list[str]:
    """Returns the SHA-256 of each file, in hex. What is remembered lies in a file below `memory`."""
    store = memory / "file_hashes.json"
    remembered = _load(store)
    hashes, fresh = [], {}
    for path in paths:
        key, settled = _key(path)
        digest = remembered.get(key)
        if digest is None:
            digest = file_hash(path)
            if settled:
                fresh[key] = digest
        hashes.append(digest)
    if fresh:
        _save(store, {**_load(store), **fresh})
    return hashes


def _key(path: Path) -> tuple[str, bool]:
    """Returns the key by which a file is remembered, and whether it may be."""
    stat = path.stat()
    return (
        f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}",
        time.time_ns() - stat.st_mtime_ns > _SETTLED_NS,
    )


def _load(store: Path) -> dict[str, str]:
    try:
        return dict(json.loads(store.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # nothing remembered: the files are read again


def _save(store: Path, hashes: dict[str, str]) -> None:
    """Writes the hashes atomically; of two writers at once one wins, and the other's files are hashed again next
    time."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(store, json.dumps(hashes))
    except OSError:
        pass  # remembering is a convenience
