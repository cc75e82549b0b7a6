"""Logs at a URL: copied once into the user's cache, and found there while the store says that they are the same.

fsspec reads http and https, and with their packages s3, gs, hdfs and others. Credentials come from where those
packages look for them (environment, ~/.aws), never from the URL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dhen.errors import UserError
from dhen.values import fingerprint, stays_below
from trials.store.user_cache import built, locked, use, user_cache

COPYING = "copying"
"""The step of progress that copies; it counts MiB."""
CHUNK_BYTES = 1 << 20
SIGNS = (
    *("ETag", "etag", "Content-MD5", "md5Hash", "checksum", "generation"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "modified", "modificationTime"),
)
"""What stores say of a file that changes with its content."""
WEB = ("http", "https")


class _File(NamedTuple):
    """A file of the log, as its store has it."""

    path: str
    name: str
    """Its path below the folder that was named; its own name if it was named itself."""
    bytes: int | None
    signs: tuple[str, ...]


def is_url(name: str) -> bool:
    """Returns whether a name is a URL and no path."""
    return "://" in name


def shown_url(url: str) -> str:
    """Returns a URL without what may be secret: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def local_copy(url: str, progress: Callable[[str, int, int | None], None] | None = None) -> Path:
    """Returns the copy of a file or a folder, which is made if there is none of this state of it.

    Args:
        url: where it lies.
        progress: called with the step's name, MiB done and MiB in all.

    Raises:
        UserError: for a URL with a password, of a kind that is not known or whose package is missing, for what is
            not there or cannot be read, and if the disk is full.
    """
    import fsspec

    shown = shown_url(url)
    if urlsplit(url).password:
        raise UserError(
            f"{shown}: a password in a URL would end up in the study's settings. Stores find theirs in the "
            "environment or in files of the user's own; for https give a signed URL."
        )
    try:
        store, path = fsspec.core.url_to_fs(url)
        files = _files(store, path, web=urlsplit(url).scheme in WEB)
    except ValueError as error:
        raise UserError(f"{shown}: {error}; http, https, s3, gs and hdfs are known, and others.") from None
    except ImportError as error:
        raise UserError(f"{shown}: its kind of store needs a package ({error}).") from None
    except Exception as error:  # each store has errors of its own
        raise _unreadable(url, error) from None
    if not files:
        raise UserError(f"{shown}: there are no files.")
    known = all(file.bytes is not None and file.signs for file in files)
    target = user_cache() / "copies" / fingerprint([shown, [file._asdict() for file in files]])
    with locked(target):
        use(target)
        if not (known and target.is_dir()):  # one that says nothing of its content may have other content now
            total = sum(file.bytes or 0 for file in files)
            with built(target, total) as folder:
                done = 0
                for file in files:
                    here = folder / file.name
                    here.parent.mkdir(parents=True, exist_ok=True)
                    with here.open("wb") as copy:
                        for chunk in _chunks(store, file, url):
                            copy.write(chunk)
                            done += len(chunk)
                            if progress is not None:
                                progress(COPYING, done >> 20, total >> 20)
                    size = here.stat().st_size
                    if file.bytes not in (None, size):
                        raise UserError(f"{shown}: ended after {size:,} of {file.bytes:,} bytes; try again.")
            use(target)
    return target / files[0].name if files[0].path == path else target


def _files(store: Any, path: str, *, web: bool) -> list[_File]:
    """Returns the files at a path, in the order of their names; the web has no folders."""
    if web or not store.isdir(path):
        found = [(Path(urlsplit(path).path).name or "log", store.info(path))]
    else:
        in_folder = store.find(path, detail=True)
        found = [(name.removeprefix(path).lstrip("/"), in_folder[name]) for name in sorted(in_folder)]
    files = []
    for name, info in found:
        signs = tuple(f"{sign}={info[sign]}" for sign in SIGNS if info.get(sign) is not None)
        files.append(_File(info["name"], stays_below(name), info.get("size"), signs))
    return files


def _chunks(store: Any, file: _File, url: str) -> Iterator[bytes]:
    """Yields the bytes of a file, so many at a time."""
    stream = {"block_size": 0} if urlsplit(url).scheme in WEB else {}  # many web servers know no ranges
    try:
        with store.open(file.path, "rb", **stream) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except Exception as error:
        raise _unreadable(url, error) from None


def _unreadable(url: str, error: Exception) -> UserError:
    reason = str(error).replace(url, "").strip() or "no such file, or nobody answers"
    return UserError(f"{shown_url(url)}: cannot be read ({type(error).__name__}: {reason}).")
