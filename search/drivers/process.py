"""Which process a driver is, in words that another process of the same machine can look it up by."""

from __future__ import annotations

import os
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
DEAD = "ZXx"
"""States of a process that has ended, and whose parent has not heard of it yet."""


def this_process() -> str:
    """This process: the boot of its machine, its namespace of processes, its number, when it began.

    Where the system does not tell, only the number is there, and nobody can look the process up.
    """
    try:
        return " ".join((*_machine(), str(os.getpid()), _stat(os.getpid())[1]))
    except OSError:
        return str(os.getpid())


def is_gone(process: str) -> bool:
    """Whether a process is known to have ended: one of another machine, or of another container, never is."""
    try:
        *machine, number, began = process.split()
        if tuple(machine) != _machine():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, start = _stat(int(number))
    except OSError:
        return True
    return start != began or state in DEAD


def in_words(process: str, host: str) -> str:
    """A process of a host, as people may look it up."""
    words = process.split()
    return f"process {words[2] if len(words) == 4 else process} on {host}"


def _machine() -> tuple[str, str]:
    return BOOT.read_text().strip(), os.readlink(NAMESPACE)


def _stat(number: int) -> tuple[str, str]:
    """Returns a process's state, and the tick of the machine's clock at which it began."""
    # the name, in brackets, may have spaces and brackets itself
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
