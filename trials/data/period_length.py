"""The length of the periods that a log is cut into: a time, or a number of rows."""

from __future__ import annotations

import re
from typing import NamedTuple

from dhen.errors import UserError
from dhen.values import milliseconds_of

DAY = "1d"
"""Length of a period where none is given."""


class Length(NamedTuple):
    """The length of a period: one of the two."""

    milliseconds: int = 0
    rows: int = 0


def parse_length(text: str) -> Length:
    """Returns the length that `1d`, `6h`, `30m` (of time) or `50000` (rows) says.

    Raises:
        UserError: for anything else.
    """
    rows = int(text) if re.fullmatch(r"\s*[0-9]+\s*", text) else 0
    milliseconds = milliseconds_of(text) or 0
    if not rows and not milliseconds:
        raise UserError(
            f"period={text}: expected a time such as 1d, 6h or 30m, or a number of rows such as 50000."
        )
    return Length(milliseconds=milliseconds, rows=rows)
