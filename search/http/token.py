"""The token that clients of a server must send: given by the user, or made."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from dhen.errors import UserError

VARIABLE = "DHEN_SEARCH_TOKEN"
"""Environment variable that gives the token without showing it in the list of processes."""
SHORTEST = 12
"""Letters of a token that is given: fewer can be guessed."""


def needed_token(given: str | None, *, made: bool) -> str | None:
    """Returns the token that must be shown: the one given, else a new one if one is to be made.

    Args:
        given: what the user gave; None where nothing.
        made: whether a token is made if none is given.

    Raises:
        UserError: for a token that can be guessed.
    """
    if given is not None and len(given) < SHORTEST:
        raise UserError(
            f"--token: {len(given)} letters can be guessed; give {SHORTEST} or more, or leave it out."
        )
    return given or (secrets.token_urlsafe(24) if made else None)


def digest(token: str) -> str:
    """Returns what stands for a token where the token itself should not lie."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_token(given: str, expected_digest: str) -> bool:
    """Returns whether a digest is that of what was given."""
    # digests have one length, so that the time of comparing says nothing of the token
    return hmac.compare_digest(digest(given), expected_digest)


def bearer(authorization: str) -> str:
    """Returns the token of an `Authorization` header; an empty text where it has none (RFC 6750, section 2.1)."""
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""
