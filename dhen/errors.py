"""The one family of errors that a user can mend.

Everything a user got wrong (a file, a key, a value, a command) raises a `UserError`: the command
line prints its message alone and exits with code 2. Broken invariants of ours are plain exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Says what was wrong, what was received and what would work."""


def unknown_name(kind: str, received: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no registry: lists the known ones and the nearest."""
    names = sorted(known)
    near = difflib.get_close_matches(received, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {kind} {received!r}.{hint} Known: {', '.join(names)}.")
