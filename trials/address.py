"""`host:port` as people write it: where the hosts of a study meet, and where the ranks of a candidate do."""

from __future__ import annotations

import socket
from typing import Annotated

from pydantic import AfterValidator

PORTS = range(1, 2**16)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of an address; an IPv6 host without its brackets.

    Raises:
        ValueError: where the text is not host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) not in PORTS:
        raise ValueError("expected host:port of the first host, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def _checked(address: str) -> str:
    host_and_port(address)
    return address


Address = Annotated[str, AfterValidator(_checked)]
"""Text of the form `host:port`, the address of the first host."""


def family_of(host: str) -> socket.AddressFamily:
    """Returns IPv6 for an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(address: str, port: int) -> str:
    """Returns the same host with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def is_loopback(address: str) -> bool:
    """Tells whether only this machine can reach the address."""
    host, _ = host_and_port(address)
    return host in ("localhost", "::1") or host.startswith("127.")
