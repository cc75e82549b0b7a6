"""Addresses as people write them: the Ray cluster of a study, and where the ranks of a candidate meet."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

PORTS = range(1, 2**16)
LOCAL, RAY, RAY_CLIENT, SLURM = "local", "ray", "ray://", "slurm"
"""What starts ranks: this machine; a Ray cluster that this process is a driver of; the beginning of the address of
one that it is a client of; a Ray cluster that is made on the nodes of this Slurm job."""


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of an address; an IPv6 host without its brackets.

    Raises:
        ValueError: if the text is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) not in PORTS:
        raise ValueError("expected host:port, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def _checked(address: str) -> str:
    host_and_port(address)
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""Text of the form `host:port`, an address of the first host."""


def _is_launcher(name: str) -> str:
    if name not in (LOCAL, RAY, SLURM):
        if not name.startswith(RAY_CLIENT):
            raise ValueError(
                "expected local, ray (the cluster of RAY_ADDRESS, else the one that runs on this machine), "
                "ray://HOST:10001, or slurm (inside a Slurm job)"
            )
        host_and_port(name.removeprefix(RAY_CLIENT))
    return name


LauncherName = Annotated[str, AfterValidator(_is_launcher)]
"""Text `local`, `ray`, `ray://host:port` or `slurm`: what starts the ranks of a study."""


def family_of(host: str) -> socket.AddressFamily:
    """Returns IPv6 for an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Tells whether only this machine can reach the address."""
    host, _ = host_and_port(address)
    return host in ("localhost", "::1") or host.startswith("127.")


# The folders of a training's checkpoints: each is named after the number of steps that it is made after.

PREFIX = "after-"


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, the newest first; one that is still being made is none."""
    made = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(made, key=steps_of, reverse=True)


def steps_of(checkpoint: Path) -> int:
    """Returns the number of steps that a checkpoint is made after."""
    return int(checkpoint.name.removeprefix(PREFIX))
