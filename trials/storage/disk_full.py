"""No space left for a file: how that is recognised in what libraries raise, and what a user is told.

A full disk, a used-up quota and a limit on the size of files are one trouble with one remedy.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dhen.errors import UserError

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
