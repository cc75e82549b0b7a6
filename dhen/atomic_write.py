"""Files and folders that are whole at any moment, the old one or the new one, also when their writer is killed.

What is written goes to a temporary name beside the target, and a rename puts it in the target's place. The name
holds the process id, so two processes that write one target share no temporary, and the last rename wins. The
temporary is removed when writing fails; only a process that is killed leaves it behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhen.errors import UserError

PARTIAL = ".partial"


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Replaces a file's content by a text; a private file is readable by its owner alone (mode 0600)."""
    with atomic_file(path) as temporary:
        if private:  # before there is anything to read
            temporary.touch()
            temporary.chmod(0o600)
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a path to write a file to, which takes the place of `path` when the block ends without an error.

    The block closes what it opened there: a file that is renamed while open may lack what is still buffered.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(
            path
        )  # an error of `write` names no file, and the temporary means nothing to a user
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Gives a new folder to fill, which takes the place of `path` when the block ends without an error.

    A rename cannot replace a folder that holds something, so the old one is moved aside for a moment: a process
    that is killed just then leaves nothing at `path`. If `path` is a symbolic link, it stays, and the folder
    that it names is replaced.

    Raises:
        UserError: as `check_named`.
    """
    check_named(path)
    path = path.resolve() if path.is_symlink() else path
    partial, old = (path.with_name(f".{path.name}.{name}{PARTIAL}") for name in (os.getpid(), "old"))
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this id, which was killed
    try:
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_named(path: Path) -> None:
    """Checks that a folder is named by its name, under which another one can take its place.

    Raises:
        UserError: for `.` and `..`.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} is the folder that this command runs in, or holds it: name one by its name.")


def remove_left_behind(path: Path) -> None:
    """Removes what killed processes left of `atomic_folder(path)`; no other process may be at it meanwhile."""
    for left in path.parent.glob(f".{path.name}.*{PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)
