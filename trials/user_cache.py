"""The folder in which what is costly to make is kept for later commands: logs, this machine's speeds.

Logs there have an end: before a new one is written, those go that were unused the longest. A process that uses one
holds it by a shared lock on its folder or file, which ends with the process. If the file system has no such locks,
none goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from dhen.atomic_write import PARTIAL
from dhen.errors import UserError
from trials.cluster.quantity import parse_bytes

LIMIT = "DHEN_SEARCH_CACHE_LIMIT"
"""Variable with the bytes that logs may take, such as 20GiB; by default a tenth of the disk."""
PATTERNS = {
    "[!.]*/manifest.json": "prepared log",
    "copies/[!.]*": "copy of a log at a URL",
    "demo/[!.]*.parquet": "generated log",
}
"""Where logs lie, and what they are."""
_HELD: dict[Path, int] = {}
"""File descriptors that hold entries until this process ends."""


class CacheEntry(NamedTuple):
    """A log that is kept."""

    path: Path
    what: str
    bytes: int
    used: float
    """When it was used last, in seconds since 1970."""


def user_cache() -> Path:
    """Returns `$DHEN_SEARCH_CACHE`, else `~/.cache/dhen-search`."""
    root = os.environ.get("DHEN_SEARCH_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "dhen-search"


def cache_limit() -> int:
    """Returns the bytes that logs may take.

    Raises:
        UserError: if the variable has something else than bytes.
    """
    if words := os.environ.get(LIMIT):
        try:
            return parse_bytes(words)
        except ValueError as error:
            raise UserError(f"${LIMIT} is {words!r}: {error}.") from None
    root = user_cache().absolute()
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).total // 10


def entries() -> list[CacheEntry]:
    """Returns the logs that are kept, the longest unused first."""
    found = []
    for pattern, what in PATTERNS.items():
        for match in user_cache().glob(pattern):
            path = match.parent if match.name == "manifest.json" else match
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                files = path.rglob("*") if path.is_dir() else [path]
                size = sum(file.stat().st_size for file in files)
                # listing a folder may change its time of access
                used = path.stat().st_mtime if path.is_dir() else path.stat().st_atime
                found.append(CacheEntry(path, what, size, used))
    return sorted(found, key=lambda entry: entry.used)


def use(path: Path) -> None:
    """Notes that an entry is used now, and holds it until this process ends; other paths are left alone."""
    path = path.resolve()
    with contextlib.suppress(OSError):
        if path.is_relative_to(user_cache().resolve()):
            descriptor = os.open(path, os.O_RDONLY)
            if path in _HELD:
                os.close(_HELD[path])  # of what lay there before, and may have been replaced
            _HELD[path] = descriptor
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # a file's time of change stays: by that others know whether its content is the same
            now, modified = time.time_ns(), path.stat().st_mtime_ns
            os.utime(path, ns=(now, now if path.is_dir() else modified))


def make_room(target: Path, needed_bytes: int) -> None:
    """Removes what was unused the longest until a new entry fits; nothing if it is to lie elsewhere.

    Raises:
        UserError: as `cache_limit`.
    """
    if target.resolve().is_relative_to(user_cache().resolve()):
        kept = entries()
        excess = sum(entry.bytes for entry in kept) + needed_bytes - cache_limit()
        for entry in kept:
            if excess > 0 and entry.path.name != target.name and remove(entry.path):
                excess -= entry.bytes


def remove(path: Path) -> bool:
    """Removes an entry as a whole, unless a process holds it; returns whether it is gone."""
    gone = path.with_name(f".{path.name}.gone{PARTIAL}")
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(gone)
        finally:
            os.close(descriptor)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink()
    return not path.exists()
