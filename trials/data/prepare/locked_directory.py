"""Directories that appear whole or not at all, built by one process at a time."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dhen.atomic_write import atomic_folder, remove_left_behind
from dhen.errors import UserError
from trials.user_cache import make_room


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
            path.unlink(
                missing_ok=True
            )  # before the release: who waits for a removed file asks for a new one


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
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_space(target.parent, needed_bytes) from None
        raise


def _no_space(directory: Path, needed: int) -> UserError:
    free = shutil.disk_usage(directory).free
    return UserError(
        f"{directory}: preparing the log needs about {needed / 2**30:.2f} GiB of disk, {free / 2**30:.2f} GiB are "
        "free. Free some, or name another place with $DHEN_SEARCH_CACHE, or with the --out of `prepare`."
    )
