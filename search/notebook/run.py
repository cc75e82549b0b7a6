"""`run_study`: the main job from Python, with the driver and the settings of `dhen-search run`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dhen.errors import UserError
from search.cli import INTERRUPTED
from search.execution.clock import StudyClock
from search.logs import show_logs
from search.notebook.study import Study
from trials.runtime.launcher import Launcher

Log = str | Path | Sequence[str | Path]


def run_study(
    data: Log | None = None,
    out: str | Path | None = None,
    *,
    study: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **more_settings: Any,
) -> Study:
    """Searches on a log until the budget is spent; the same call goes on where an earlier one ended.

    Lines on standard output say how far it is. An interrupt (Ctrl-C, a notebook's Stop) raises
    `KeyboardInterrupt`; what was finished is safe, and the same call goes on from there.

    Args:
        data: files or folders of the log, a prepared log, or `"demo"` for the built-in one; None for the log that
            the study has, or the built-in one.
        out: run directory; by default `runs/NAME`.
        study: a study file (YAML) whose settings hold if no others are given.
        settings: settings by name, as `dhen-search run` has them; those with a dot as `"training.epochs"`, or as a
            mapping in the mapping.
        more_settings: settings whose names have no dot, such as `trials=20` or `training={"epochs": 1}`.

    Returns:
        The study as it stands at the end.

    Raises:
        UserError: for whatever is wrong with the log, the settings or the run directory.
    """
    clock = StudyClock()
    given = {**(settings or {}), **more_settings}
    words = tuple(f"{key}={_written(value)}" for key, value in _flat(given))
    log = () if data is None else (data,) if isinstance(data, str | Path) else data
    show_logs(0)
    launcher = Launcher(several_ranks=given.get("ranks") is not None)
    launcher.warm_up()
    from search.study.run_session import (
        run_session,
    )  # torch is imported here and in the fork server side by side

    # a notebook's kernel calls its output a terminal, and cannot redraw: it gets lines of text
    on_terminal = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty()
    console = Console(force_jupyter=False, force_terminal=on_terminal)
    file = (str(study),) if study is not None else ()
    directory = None if out is None else Path(out)
    try:
        record = run_session(
            (*file, *words), tuple(map(str, log)), directory, launcher, clock, console=console
        )
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    return Study(Path(record.directory))


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _written(value: Any) -> str:
    """A value as a word of the command line has it."""

    def plain(value: Any) -> Any:
        """What JSON does not know: a path is its text, a number of NumPy's is Python's."""
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "item"):
            return value.item()
        raise TypeError

    try:
        return json.dumps(value, default=plain)
    except (TypeError, ValueError):
        raise UserError(
            f"{value!r} is no value of a setting; give text, a number, a list, a mapping or None."
        ) from None
