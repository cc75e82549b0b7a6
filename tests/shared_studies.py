"""What many tests begin with, made once for all of them and kept on disk: a log, finished studies, bundles.

It lies under pytest's cache, in a folder for this state of the product, of what makes it here and of what is
installed. It is read alone: a test that writes takes a copy.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]
ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")
MAKERS = ("shared_studies.py", "command_line.py", "search/conftest.py")
FOLDER = ROOT / ".pytest_cache" / "shared"
DAY_SECONDS = 86_400.0


@cache
def folder() -> Path:
    """Of this state of everything; those of states that nobody has asked for since yesterday are removed."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix not in ("", ".pyc")]
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted([*files, *(ROOT / "tests" / name for name in MAKERS)]):
        digest.update(str(path).encode() + path.read_bytes())
    for installed in sorted(f"{each.metadata['Name']} {each.version}" for each in distributions()):
        digest.update(installed.encode())
    ours = FOLDER / digest.hexdigest()[:16]
    ours.mkdir(parents=True, exist_ok=True)
    ours.touch()
    for other in FOLDER.iterdir():
        if other.stat().st_mtime < time.time() - DAY_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return ours


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """The folder with this name, made by whichever process of tests comes first."""
    place = folder() / name
    made = place / ".made"
    with FileLock(f"{place}.lock"):
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            made.touch()
    return place
