"""One session of the main job: from the command's words to the report and the best candidate's bundle."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from dashboards.summary import sentences
from dhen.errors import UserError
from search.config import DEMO, StudyConfig, check_directory, read_study_config, write_config
from search.directory import STUDY_FILE, only_driver
from search.export import export
from search.log import open_log
from search.publisher import REPORT, Publisher
from search.study import Study
from search.terminal import StudyView, step_progress
from trials.data.cache import PreparedLog
from trials.launcher import Launcher
from trials.record import StudyRecord

BEST = "best"
INTERRUPTED = 130


def run_session(words: tuple[str, ...], data: tuple[str, ...], out: Path | None, launcher: Launcher) -> None:
    """Searches until the budget is spent, or Ctrl-C (exit code 130); the same words go on from there.

    Raises:
        UserError: for whatever is wrong with the words, the log or the run directory.
    """
    console = Console()
    file, overrides = _split_words(words)
    directory = out or _default_directory(file, data)
    base = file or (directory / STUDY_FILE if _resumes(directory, data) else None)
    config = read_study_config(base, overrides, data=data or None)
    if config.trials is None and config.minutes is None:
        raise UserError("a study needs a budget: give trials=N, minutes=M, or both.")
    with only_driver(directory):
        check_directory(directory, config)
        with step_progress(console) as progress:
            log = open_log(config, progress)
        record = _search(config, directory, log, launcher, console)
    if record.front:
        export(record, log, "best", directory / BEST)
    for sentence in sentences(record):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"report: {directory / REPORT}\nbrowse: dhen-search ui {directory}", soft_wrap=True)
    if record.front:
        console.print(f"bundle: {directory / BEST} (dhen-search predict {directory / BEST} --data ...)")


def _search(
    config: StudyConfig, directory: Path, log: PreparedLog, launcher: Launcher, console: Console
) -> StudyRecord:
    """The study, with the terminal, the report and MLflow following it."""
    publisher = Publisher(directory, console)
    with StudyView(console) as view:
        study = Study(config, directory, log, launcher, view, publisher)
        write_config(directory, config)
        try:
            return study.run()
        except KeyboardInterrupt:
            console.print(f"\ninterrupted; the same command goes on ({directory}).")
            sys.exit(INTERRUPTED)
        finally:
            publisher.finish(study.record())


def _split_words(words: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """An optional study file first, then `key=value` words."""
    if words and "=" not in words[0]:
        return Path(words[0]), list(words[1:])
    return None, list(words)


def _default_directory(file: Path | None, data: tuple[str, ...]) -> Path:
    if file is not None:
        return Path("runs") / file.stem
    return Path("runs") / (Path(data[0]).name.split(".")[0] or "log" if data else DEMO)


def _resumes(directory: Path, data: tuple[str, ...]) -> bool:
    """Without a study file and a log, a run directory's own settings are what is meant."""
    return not data and (directory / STUDY_FILE).exists()
