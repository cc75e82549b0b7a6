"""The option `--data demo` where the current folder holds something named `demo`: that is read, and said."""

from __future__ import annotations

from pathlib import Path

import click


def files_first(
    context: click.Context, parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """A callback of `--data`: the built-in log has the name `demo` where nothing here has it."""
    from search.config import DEMO

    if names != (DEMO,) or not Path(DEMO).exists():
        return names
    click.echo(
        f"--data {DEMO}: the {'folder' if Path(DEMO).is_dir() else 'file'} of this name here is read, not the "
        "built-in demo log; for that run the command in another folder.",
        err=True,
    )
    return (f"./{DEMO}",)
