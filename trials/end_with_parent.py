"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has this process, which multiprocessing has started, end with the one that started it, even if stopped. On
    systems whose kernel does not do that, a thread waits for the end.

    Args:
        parent: id of the process that this one was forked from.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it was gone before
    starter = multiprocessing.parent_process()
    if starter is None:
        return

    def watch() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
