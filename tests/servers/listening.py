"""Which addresses the processes below this one listen on, as the kernel has them."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LISTENS = "0A"
"""The state of a socket that waits for connections, in /proc/net/tcp."""
PAUSE_SECONDS = 0.05


@contextmanager
def noted_listeners() -> Iterator[set[str]]:
    """Addresses that a process below this one has listened on while the block ran."""
    found: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(PAUSE_SECONDS):
            sockets = _listening()
            found.update(
                sockets[inode] for pid in _below(os.getpid()) for inode in _sockets(pid) if inode in sockets
            )

    looks = threading.Thread(target=look)
    looks.start()
    try:
        yield found
    finally:
        done.set()
        looks.join()


def _listening() -> dict[str, str]:
    """Address of each listening TCP socket, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS:
                found[inode] = _address(local.partition(":")[0])
    return found


def _address(digits: str) -> str:
    """An address from words of four bytes, each in the machine's order."""
    words = [int(digits[first : first + 8], 16) for first in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def _below(ancestor: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [ancestor]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found[1:]


def _sockets(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    return found
