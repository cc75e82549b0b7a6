"""The socket that a server listens on, taken by the command before the server starts.

A port that was only found to be free could be another server's by the time ours asks for it, and questions meant
for ours would be answered by that one.
"""

from __future__ import annotations

import socket

from dhen.errors import UserError

USUAL_PORT = 5000
LOOPBACK = "127.0.0.1"
LOCAL = (LOOPBACK, "localhost", "::1")
"""Addresses at which this machine alone is answered."""
ANY = ("0.0.0.0", "::")
"""Addresses that stand for all of this machine's."""


def listening(host: str, wanted: int | None) -> socket.socket:
    """Returns a socket that listens on the wanted port; where none is wanted on the usual one, or any that is
    free.

    Raises:
        UserError: where the port is taken, or the address is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for port in (USUAL_PORT, 0) if wanted is None else (wanted,):
        # asyncio sends small answers at once (TCP_NODELAY) only on sockets that name their protocol; without it
        # the kernel keeps the second part of an answer for 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
        else:
            return listener
    remedy = (
        f"{LOOPBACK}, this machine alone, and 0.0.0.0, all its addresses, would work"
        if wanted is None
        else "leave --port out to have a free one picked"
    )
    raise UserError(f"cannot listen on {host}, port {port}: {reason}; {remedy}.")


def shown_address(host: str, port: int) -> str:
    """Returns the address to ask at, from another machine too where a server that listens on `host` is reached
    there."""
    return f"http://{in_url(socket.gethostname() if host in ANY else host)}:{port}"


def in_url(host: str) -> str:
    """Returns a host as addresses have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
