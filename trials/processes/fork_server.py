"""The environment of the fork server that processes of ours come from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

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
