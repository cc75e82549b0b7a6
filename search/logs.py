"""Logging of the driver: into `driver.log` of the folder that it works in, and with `-v` on stderr too.

Users see sentences on the terminal; the log is for engineers: what was decided, when, about which trial.
Modules log by their own names (`logging.getLogger(__name__)`). Ranks have files of their own, in the trials'
folders (`trials.runtime.rank_process`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich import control

from trials.runtime.rank_process import DATE_FORMAT, FORMAT
from trials.store.user_cache import is_disk_full

# Control characters in text that is printed or logged: shown as escapes, so that no value of a log clears a
# terminal, moves its cursor, or hides a line.

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


ROOMS = ("dhen", "spaces", "trials", "dashboards", "search")


def show_logs(verbosity: int) -> None:
    """Shows what modules log on stderr: nothing at 0, what they did at 1 (`-v`), details at 2 (`-vv`)."""
    handler: logging.Handler = logging.NullHandler()
    if verbosity:
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
        handler.setFormatter(_Formatter(FORMAT, DATE_FORMAT))
    for name in ROOMS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
        # one command after another in one process, as tests run them, must not show lines twice
        logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
        logger.addHandler(handler)


class _Formatter(logging.Formatter):
    """The format of lines, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, and its traceback."""
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file; what finds no space there is left out, and the study's own files say that there is none."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Prints what goes wrong with logging, unless it is want of space."""
        error = sys.exc_info()[1]
        if error is None or not is_disk_full(error):
            super().handleError(record)

    def close(self) -> None:
        """Closes the file, whose last lines may find no space."""
        try:
            super().close()
        except OSError as error:
            if not is_disk_full(error):
                raise


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """A context in which what modules log is appended to a file, also by a session that resumes another."""
    handler = _LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(_Formatter(FORMAT, DATE_FORMAT))
    loggers = [logging.getLogger(name) for name in ROOMS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
