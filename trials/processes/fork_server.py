"""The environment of the fork server that processes of ours come from."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
from collections.abc import Iterator
from multiprocessing import util

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
