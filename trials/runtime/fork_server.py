"""The environment of the fork server that processes of ours come from."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import util
from types import ModuleType

from dhen.errors import UserError

SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
"""Environment of the fork server. OpenMP in the server must never have had more than one thread, or processes that
use two hang; and what lies in the current folder (a `trials/` of the user's) must not be imported in place of this
project."""
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""Setting of torch's allocator on CUDA devices, unless whoever starts the driver has made one: without it tensors
of many sizes leave gaps, on an H100 of up to half of what they take (docs/benchmarks/accelerator.md).
"""
MOST_SOCKET_BYTES, SOCKET_NAME_BYTES = 107, len("/listener-12345678")
"""Bytes of the longest path of a Unix socket on Linux, and of what multiprocessing adds to its folder."""
SOCKETS = "DHEN_SEARCH_SOCKETS"
"""Variable that tells the fork server in which temporary folder its driver has made its socket."""


@contextlib.contextmanager
def server_environment() -> Iterator[None]:
    """Sets the environment that the fork server must be started with, should it be started now.

    Raises:
        UserError: if the path of temporary files is too long for a socket.
    """
    folder = util.get_temp_dir()
    if len(os.fsencode(folder)) + SOCKET_NAME_BYTES > MOST_SOCKET_BYTES:
        raise UserError(
            f"{folder}: processes are started through a socket there, whose path may have {MOST_SOCKET_BYTES} "
            "bytes. Set TMPDIR to a folder with a shorter path, such as /tmp."
        )
    environment = SERVER_ENVIRONMENT | {SOCKETS: folder}
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        environment |= {ALLOCATOR_VARIABLES[0]: EXPANDABLE_SEGMENTS}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tidy_up_at_exit() -> None:
    """Has the fork server, this process, remove its socket's folder at its end; a driver that is killed cannot."""
    if (folder := os.environ.pop(SOCKETS, None)) is not None:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


# Processes of multiprocessing that do not import the program that starts them.
#
# Each would import it, to find what it is to run there. What runs in ours lies in this project, and the program
# may be a plain script, without `if __name__ == "__main__"`, which would start its study once more.


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """A context in which processes are started that do not import the caller's main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# Processes that end with the one that started them, however that one ends.

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
