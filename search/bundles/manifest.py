"""The manifest of a folder: SHA-256 of every file in it, by which a reader knows that they are whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from dhen.errors import UserError
from dhen.fingerprint import file_hash
from dhen.values import PathBelow

MANIFEST = "manifest.json"
_HASHES = TypeAdapter(dict[PathBelow, str])


def write_manifest(folder: Path) -> None:
    """Writes the hashes of all files of a folder; the last of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {str(path.relative_to(folder)): file_hash(path) for path in paths}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1, sort_keys=True), encoding="utf-8")


def check_is_bundle(path: Path) -> None:
    """Checks that a folder says it is a bundle.

    Raises:
        UserError: where it does not.
    """
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: no bundle here ({MANIFEST} is missing); `dhen-search export` makes one.")


def first_fault(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """The first file that is not as it was written, with the reason, in words; None where all are.

    Args:
        folder: the folder.
        needed: names of files that are read, and so have to be in the manifest.

    Raises:
        ValueError: for a damaged manifest.
    """
    hashes = file_hashes(folder)
    for name in needed:
        if name not in hashes:
            return f"{name} is not in {MANIFEST}"
    for name, expected in hashes.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if file_hash(folder / name) != expected:
            return f"{name} was altered"
    return None


def file_hashes(folder: Path) -> dict[str, str]:
    """Returns the hashes in a folder's manifest, by file.

    Raises:
        ValueError: for a damaged manifest.
    """
    return _HASHES.validate_json((folder / MANIFEST).read_bytes(), strict=True)
