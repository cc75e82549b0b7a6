"""The folder in which what is costly to make is kept for later commands: prepared logs, this machine's speeds.

It has an end: before something large is written there, entries go that were unused the longest. A process that
uses an entry holds it by a shared lock on its folder or file, which ends with the process; an entry goes only if
nobody holds it. If the file system has no such locks, none goes.
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
"""Variable with the bytes that the cache may have, such as 20GiB."""
SHARE_OF_DISK = 0.1
"""What it may have where the variable is not set."""
GROUPS = {
    "demo": "generated log",
    "copies": "copy of a log at a URL",
    "mlflow": "empty MLflow store",
    "part-costs": "measured speeds",
    "shared-costs": "measured speeds",
    "tables": "embedding tables",
}
"""Folders whose children are entries, and what those are."""
GOING = ("prepared log", "rows for refitting", GROUPS["demo"], GROUPS["copies"])
"""What is large, and goes by itself."""
_HELD: dict[Path, int] = {}
"""File descriptors that hold entries until this process ends."""


class CacheEntry(NamedTuple):
    """Something that is kept."""

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
    """Returns the bytes that the cache may have.

    Raises:
        UserError: if the variable has something else than bytes.
    """
    words = os.environ.get(LIMIT)
    if words:
        try:
            return parse_bytes(words)
        except ValueError as error:
            raise UserError(f"${LIMIT} is {words!r}: {error}.") from None
    root = user_cache().absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    return int(shutil.disk_usage(there).total * SHARE_OF_DISK)


def entries() -> list[CacheEntry]:
    """Returns what the cache has, the longest unused first."""
    root, found = user_cache(), []
    for path in root.iterdir() if root.is_dir() else ():
        children = path.iterdir() if path.name in GROUPS and path.is_dir() else (path,)
        for entry in children:
            if not entry.name.startswith((".", "_README_")):
                with contextlib.suppress(FileNotFoundError):  # another process has removed it
                    found.append(_entry(entry))
    return sorted(found, key=lambda entry: entry.used)


def _entry(path: Path) -> CacheEntry:
    stat, what = path.stat(), GROUPS.get(path.parent.name)
    if not path.is_dir():
        return CacheEntry(path, what or "hashes of files", stat.st_size, max(stat.st_atime, stat.st_mtime))
    size = sum(file.stat().st_size for file in path.rglob("*"))
    what = what or ("rows for refitting" if "+" in path.name else "prepared log")
    return CacheEntry(path, what, size, stat.st_mtime)


def use(path: Path) -> None:
    """Notes that an entry is used now, and holds it until this process ends; other paths are left alone."""
    path = path.resolve()
    if not path.is_relative_to(user_cache().resolve()):
        return
    with contextlib.suppress(OSError):
        while True:
            descriptor = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
            os.close(descriptor)  # it was removed, and made again, meanwhile
        if path in _HELD:
            os.close(_HELD[path])
        _HELD[path] = descriptor
        # by a file's time of change others know whether its content is the same
        modified = time.time_ns() if path.is_dir() else path.stat().st_mtime_ns
        os.utime(path, ns=(time.time_ns(), modified))


def make_room(target: Path, needed_bytes: int) -> None:
    """Removes the longest unused of what is large, until a new entry is within the limit; nothing for other paths.

    Raises:
        UserError: if the limit is none.
    """
    if not target.resolve().is_relative_to(user_cache().resolve()):
        return
    kept = entries()
    excess = sum(entry.bytes for entry in kept) + needed_bytes - cache_limit()
    for entry in kept:
        if excess > 0 and entry.what in GOING and entry.path.name != target.name and remove(entry.path):
            excess -= entry.bytes


def remove(path: Path) -> bool:
    """Removes an entry as a whole, unless a process holds it; returns whether it is gone."""
    gone = path.with_name(f".{path.name}.gone{PARTIAL}")
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(gone)
        finally:
            os.close(descriptor)
    except OSError:
        return not path.exists()
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)
        path.with_name(f"_README_{path.stem}.txt").unlink(missing_ok=True)  # a generated log's note
    return True
