"""Control characters in text that is printed or logged: shown as escapes, so that no value of a log clears a
terminal, moves its cursor, or hides a line."""

from __future__ import annotations

from functools import wraps
from typing import Any

import click
from rich import control

ESCAPES = {code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""What is shown of each control character: its escape in JSON, so that printed JSON stays JSON."""


def printable(text: str) -> str:
    """Returns text with escapes in place of control characters."""
    return text.translate(ESCAPES)


def escape_control_characters() -> None:
    """Has click and rich, through which all goes that this process prints, escape control characters of text.

    Rich drops some of them from each text, by a table of its own, which gets all here. Its own sequences, for
    colours and for tables that are drawn again, are no text and stay.
    """
    control._CONTROL_STRIP_TRANSLATE.update(ESCAPES)
    if not hasattr(click.echo, "__wrapped__"):
        plain = click.echo

        @wraps(plain)
        def echo(message: Any | None = None, *args: Any, **kwargs: Any) -> None:
            plain(printable(message) if isinstance(message, str) else message, *args, **kwargs)

        click.echo = echo  # modules ask click for it when they print
