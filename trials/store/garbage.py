"""Python's search for garbage, put off while thousands of values or modules are made and none is thrown away."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context in which no circles are looked for: looking for them among thousands of values took half of the
    time, and a tenth of that of imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
