"""Processes of multiprocessing that do not import the program that starts them.

Each would import it, to find what it is to run there. What runs in ours lies in this project, and the program may
be a plain script, without `if __name__ == "__main__"`, which would start its study once more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """A context in which processes are started that do not import the caller's main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
