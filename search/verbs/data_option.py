"""The option `--data`: a log's files, or the built-in `demo` log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
LOG = "The log: files, a folder, a prepared log, a URL of one, `demo`."
"""Help of a command that takes any log."""


def data_option(help_text: str = LOG, *, required: bool = False) -> Callable[[Command], Command]:
    """Returns the decorator that gives a command the option."""
    return click.option("--data", multiple=True, callback=_files_first, required=required, help=help_text)


def _files_first(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Reads what the current folder holds under the name `demo` rather than the built-in log, and says so."""
    from search.log_config import DEMO

    if names != (DEMO,) or not Path(DEMO).exists():
        return names
    click.echo(
        f"--data {DEMO}: the {'folder' if Path(DEMO).is_dir() else 'file'} of this name here is read, not the "
        "built-in demo log; for that run the command in another folder.",
        err=True,
    )
    return (f"./{DEMO}",)
