"""`run`: the main job, from a click log to the best DHEN."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from dashboards.names import short_name
from dashboards.page import write_report
from dashboards.summary import sentences
from dhen.errors import UserError
from search.config import DEMO, check_directory, read_study_config, write_config
from search.directory import STUDY_FILE, only_driver, write_record
from search.export import export
from search.log import open_log
from search.study import Study, Watchers
from search.terminal import StudyView, step_progress
from trials.launcher import Launcher
from trials.record import StudyRecord
from trials.tracking import Tracker

REPORT, BEST = "report.html", "best"
INTERRUPTED = 130


@click.command(
    epilog="""\b
Examples:
  dhen-search run                                  the demo log, into runs/demo
  dhen-search run --data log.csv trials=50 minutes=120
  dhen-search run study.yaml --out runs/mine space=wide training.epochs=1
""",
)
@click.argument("words", nargs=-1, metavar="[STUDY.yaml] [key=value ...]")
@click.option("--data", multiple=True, help="The log: files, a folder, a prepared log, or `demo`.")
@click.option("--out", type=click.Path(path_type=Path), help="The run directory (default runs/NAME).")
def command(words: tuple[str, ...], data: tuple[str, ...], out: Path | None) -> None:
    """Search for the DHEN with the best NE for its FLOPs; the same command resumes it.

    Keys: trials, minutes, seed, space, sampler, label, baseline, baseline_trials, threads, and dotted
    paths into the study file, e.g. training.batch_size=4096 or demo.rows=1000000.
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
        launcher = Launcher()
        launcher.warm_up()
        with step_progress(console) as progress:
            log = open_log(config, progress)
        publisher = Publisher(directory, console)
        with StudyView(console) as view:
            study = Study(config, directory, log, launcher, Watchers(changed=view, publish=publisher))
            write_config(directory, config)
            try:
                record = study.run()
            except KeyboardInterrupt:
                console.print(f"\ninterrupted; the same command goes on ({directory}).")
                sys.exit(INTERRUPTED)
    if record.front:
        export(record, log, "best", directory / BEST)
    for sentence in sentences(record):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"report: {directory / REPORT}\nbrowse: dhen-search ui {directory}", soft_wrap=True)
    if record.front:
        console.print(f"bundle: {directory / BEST} (dhen-search predict {directory / BEST} --data ...)")


class Publisher:
    """Brings the report, the record and MLflow up to date; MLflow's troubles are told, and not fatal."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._directory, self._console = directory, console
        self._tracker: Tracker | None = None
        self._trouble = ""

    def __call__(self, record: StudyRecord) -> None:
        """Writes what changed."""
        write_record(self._directory, record)
        write_report(record, self._directory / REPORT)
        try:
            self._tracker = self._tracker or Tracker.open(self._directory, name_model=short_name)
            self._tracker.sync(record, report=self._directory / REPORT)
        except UserError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._console.print(f"warning: MLflow is behind: {error}", style="yellow", soft_wrap=True)


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
