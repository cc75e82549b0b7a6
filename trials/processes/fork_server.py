"""The fork server that processes of ours come from: its environment, and what they must not import."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
"""Environment of the fork server. OpenMP in the server must never have had more than one thread, or processes that
use two hang; and what lies in the current folder (a `trials/` of the user's) must not be imported in place of this
project."""


@contextlib.contextmanager
def server_environment() -> Iterator[None]:
    """Sets the environment that the fork server must be started with, should it be started now."""
    before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
    os.environ.update(SERVER_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keeps multiprocessing from importing the caller's main module in each process; what runs there needs none of
    it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
