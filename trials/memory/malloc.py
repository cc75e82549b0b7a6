"""Keeps freed memory with the process, so that a step's activations do not fault their pages in anew.

glibc gives allocations of megabytes back to the system as soon as they are freed; a training step frees and asks
for the same ones again and again. How much keeping them gains is in docs/log.md.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER_TRIM = 2**31 - 1
GROW_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Tells the C library to keep freed memory, where it is glibc; elsewhere nothing happens."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_TOP_PAD, GROW_BYTES)
