"""The folder in which what is costly to make is kept for later commands: logs, this machine's speeds.

Logs there have an end: before a new one is written, those go that were unused the longest. A process that uses
one holds it by a shared lock on its folder or file, which ends with the process. If the file system has no
such locks, none goes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from dhen.atomic_write import PARTIAL, atomic_folder, remove_left_behind
from dhen.errors import UserError
from trials.cluster.cluster import parse_bytes

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


# Directories that appear whole or not at all, built by one process at a time.


@contextmanager
def locked(target: Path, *, seconds: float = math.inf) -> Iterator[None]:
    """Holds the target against other processes; what a killed one left behind is removed.

    Raises:
        filelock.Timeout: when another process has held it for so many seconds.
        UserError: when nothing can be written beside the target.
    """
    path = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = -1 if seconds == math.inf else seconds
        # a soft lock would outlive a killed process
        lock = FileLock(path, timeout=waiting, fallback_to_soft=False).acquire()
    except Timeout:
        raise
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}); name another place.") from None
    with lock:
        remove_left_behind(target)
        try:
            yield
        finally:
            # before the release: who waits for a removed file asks for a new one
            path.unlink(missing_ok=True)


@contextmanager
def built(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Makes a new directory to fill, which takes the target's place when the `with` body ends without an error.

    Args:
        target: the directory to make or to replace; it must be `locked`.
        needed_bytes: about how much will be written.

    Raises:
        UserError: when the disk is full, or would be.
    """
    make_room(target, needed_bytes)
    if shutil.disk_usage(target.parent).free < needed_bytes:
        raise _no_space(target.parent, needed_bytes)
    try:
        with atomic_folder(target) as partial:
            yield partial
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _no_space(target.parent, needed_bytes) from None
        raise


def _no_space(directory: Path, needed: int) -> UserError:
    free = shutil.disk_usage(directory).free
    return UserError(
        f"{directory}: preparing the log needs about {needed / 2**30:.2f} GiB of disk, {free / 2**30:.2f} GiB are "
        "free. Free some, or name another place with $DHEN_SEARCH_CACHE, or with the --out of `prepare`."
    )


# No space left for a file: how that is recognised in what libraries raise, and what a user is told.
#
# A full disk, a used-up quota and a limit on the size of files are one trouble with one remedy.

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_WORDS = re.compile(
    "|".join(
        [
            *(re.escape(os.strerror(code)) for code in NO_SPACE),
            rf"os error ({'|'.join(map(str, NO_SPACE))})\b",
            r"inline_container.*unexpected pos",
        ]
    )
)
"""Pattern of what libraries that are not written in Python say of it: gloo, safetensors, torch.save."""


class DiskFullError(UserError):
    """A file could not be written for want of space."""


def is_disk_full(error: BaseException) -> bool:
    """Tells whether an error, or one that it came from, is want of space for a file."""
    return any(
        isinstance(cause, DiskFullError)
        or (isinstance(cause, OSError) and cause.errno in NO_SPACE)
        or IN_WORDS.search(str(cause)) is not None
        for cause in _causes(error)
    )


def disk_full(what: Path | str) -> DiskFullError:
    """Returns the error that names a file, how much space there is, and what to do."""
    return DiskFullError(
        f"{what}: no space to write it. {free_space(Path(what))} Free some space there, then run the same command "
        "again: what was finished is safe, and it goes on from there."
    )


def free_space(path: Path) -> str:
    """Returns a sentence on how much space there is where a file lies, or would lie."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    free = f"{shutil.disk_usage(there).free / 2**20:,.1f} MiB are free on its disk"
    return f"{free}, unless a quota or a limit on the size of files allows less."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and what it came from; torch's checkpoints keep one error per rank in `failures`."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        failures = getattr(cause, "failures", None)
        of_ranks = [failure[0] for failure in failures.values()] if isinstance(failures, dict) else []
        waiting += [each for each in (cause.__cause__, cause.__context__, *of_ranks) if each is not None]
