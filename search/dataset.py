"""The log a study searches on: the demo log, files of your own, or a prepared log, as a cache on disk."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dhen.errors import UserError
from dhen.values import fingerprint
from search.log_config import DEMO, DemoConfig, LogConfig
from trials.data.demo.generate import generate
from trials.data.log_schema import LogSchema
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.remote import is_url, local_copy, shown_url
from trials.data.schema_yaml import read_schema
from trials.store.user_cache import use, user_cache


class MissingLogError(UserError):
    """There is nothing at a path of a log."""


OnProgress = Callable[[str, int, int | None], None]


def open_log(
    config: LogConfig, progress: OnProgress | None = None, schema: LogSchema | None = None
) -> PreparedLog:
    """The prepared log of a study or a table; known logs are reused, others prepared now.

    Args:
        config: what the log is of, and how it is read.
        progress: called with a step's name, what is done and how much there is.
        schema: what `config.schema_file` holds, if another machine has that file.

    Raises:
        UserError: for anything wrong with the files or the schema.
    """
    schema = schema or _given_schema(config)
    paths = log_files(config.data, config.demo, progress)
    return prepare(paths, options=config, schema=schema, progress=progress)


def open_study_log(config: LogConfig, directory: Path, progress: OnProgress | None = None) -> PreparedLog:
    """The prepared log of the study in a run directory, as its settings name it.

    Raises:
        UserError: as `open_log`; if the log is missing, with the command that passes its new path.
    """
    try:
        return open_log(config, progress)
    except MissingLogError as error:
        raise UserError(
            f"{error} If the log has moved, `dhen-search run {directory} --data PATH` goes on with it there."
        ) from None


def log_getter(config: LogConfig) -> Callable[[], PreparedLog] | None:
    """Returns how another machine gets the same log into a cache of its own; None if it lies in files here.

    Raises:
        UserError: if the schema's file is missing or wrong.
    """
    if list(config.data) != [DEMO] and not all(map(is_url, config.data)):
        return None
    return partial(open_log, config, schema=_given_schema(config))


def _given_schema(config: LogConfig) -> LogSchema | None:
    return read_schema(Path(config.schema_file)) if config.schema_file else None


def log_files(
    names: Sequence[str], demo: DemoConfig | None = None, progress: OnProgress | None = None
) -> list[Path]:
    """The paths that `--data` names: `demo` alone is the demo log, a pattern (`days/*.csv`) stands for what fits
    it, in the order of the names, and what lies at a URL is copied here.

    Raises:
        UserError: naming the first path that is missing, or cannot be copied.
    """
    if "" in names:  # an unset variable of a shell; as a path it would be the current folder
        raise UserError(f"--data is empty; name a log, a prepared log, or `{DEMO}`.")
    if list(names) == [DEMO]:
        demo = demo or DemoConfig()
        folder = user_cache() / "demo"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"demo-{demo.rows}-{demo.seed}"
        if demo != DemoConfig(rows=demo.rows, seed=demo.seed):
            name += f"-{fingerprint(demo.to_dict())}"
        path = folder / f"{name}.parquet"
        use(path)
        generate(demo, path, progress=progress)
        use(path)  # it may be new
        return [path]
    paths: list[Path] = []
    for name in names:
        if is_url(name):
            paths.append(local_copy(name, progress))
        elif not _is_pattern(name):
            paths.append(Path(name))
        elif found := sorted(glob.glob(name, recursive=True)):
            paths += map(Path, found)
        else:
            raise MissingLogError(f"{name}: no file or folder fits this pattern.")
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise MissingLogError(f"{missing[0]}: no such file or folder (a log, a prepared log, or `{DEMO}`).")
    return paths


def _is_pattern(name: str) -> bool:
    return glob.has_magic(name) and not Path(name).exists()


def log_name(names: Sequence[str]) -> str:
    """A short name for the log that `--data` names, for folders of what is made of it."""
    if is_url(names[0]):
        path = Path(shown_url(names[0]))
    else:
        path = Path(names[0]).resolve().parent if _is_pattern(names[0]) else Path(names[0])
    return path.name.split(".")[0] or "log"
