"""What the servers of `ui` and `serve` share: the socket that they listen on, and the token that clients send.

The command takes the socket before its server starts. A port that was only found to be free could be another
server's by the time ours asks for it, and questions meant for ours would be answered by that one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from dhen.errors import UserError

USUAL_PORT = 5000
LOOPBACK = "127.0.0.1"
LOCAL = (LOOPBACK, "localhost", "::1")
"""Addresses at which this machine alone is answered."""
ANY = ("0.0.0.0", "::")
"""Addresses that stand for all of this machine's."""
TOKEN_VARIABLE = "DHEN_SEARCH_TOKEN"
"""Environment variable that gives the token without showing it in the list of processes."""
SHORTEST_TOKEN = 12
"""Letters of a token that is given: fewer can be guessed."""


def listening(host: str, wanted: int | None) -> socket.socket:
    """Returns a socket that listens on the wanted port; if none is wanted on the usual one, or any that is free.

    Raises:
        UserError: if the port is taken, or the address is none of this machine's.
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
    """Returns the address to ask at, also from another machine if a server that listens on `host` can be reached
    from there."""
    host = socket.gethostname() if host in ANY else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def needed_token(given: str | None, *, made: bool) -> str | None:
    """Returns the token that must be shown: the one given, else a new one if one is to be `made`.

    Raises:
        UserError: for a token that can be guessed.
    """
    if given is not None and len(given) < SHORTEST_TOKEN:
        raise UserError(
            f"--token: {len(given)} letters can be guessed; give {SHORTEST_TOKEN} or more, or leave it out."
        )
    return given or (secrets.token_urlsafe(24) if made else None)


def digest(token: str) -> str:
    """Returns what stands for a token in places that should not hold the token itself."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_token(given: str, expected_digest: str) -> bool:
    """Returns whether a digest is that of what was given."""
    # digests have one length, so that the time of comparing says nothing of the token
    return hmac.compare_digest(digest(given), expected_digest)


def bearer(authorization: str) -> str:
    """Returns the token of an `Authorization` header, or an empty text (RFC 6750, section 2.1)."""
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""
