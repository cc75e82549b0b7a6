"""The one family of errors that a user can mend.

Everything a user got wrong (a file, a key, a value, a command) raises a `UserError`: the command
line prints its message alone and exits with code 2. Broken invariants of ours are plain exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

FEWEST_LETTERS = 3
"""A part of a name this long says which name was meant."""


EXIT_CODE = 2
"""Exit code of the command line after a `UserError`, and after other errors that are not ours."""


class UserError(ValueError):
    """Says what was wrong, what was received and what would work."""


class ScoreError(ArithmeticError):
    """A model gave a score that is no probability. Its weights are to blame, not the rows: the command line exits
    with code 1."""


def unknown_name(kind: str, received: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no registry: lists the known ones and the nearest."""
    names = sorted(known)
    near = _nearest(received, names)
    hint = f" Did you mean {near!r}?" if near else ""
    return UserError(f"unknown {kind} {received!r}.{hint} Known: {', '.join(names)}.")


def listed(names: Sequence[str], most: int) -> str:
    """Returns the first of many names, separated by commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _nearest(received: str, names: list[str]) -> str | None:
    """The shortest name that begins with what was received, or else holds it, or else looks like it."""
    if len(received) >= FEWEST_LETTERS:
        for part_of in (str.startswith, str.__contains__):
            whole = [name for name in names if part_of(name.lower(), received.lower())]
            if whole:
                return min(whole, key=len)
    return next(iter(difflib.get_close_matches(received, names, n=1, cutoff=0.5)), None)
