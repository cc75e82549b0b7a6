"""One session of the main job: from the command's words to the report and the best candidate's bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from dashboards.sentences.summary import sentences
from dhen.errors import UserError
from search.bundles.export import export
from search.config import DEMO, StudyConfig, check_directory, read_study_config, write_config
from search.dataset import open_log
from search.run_directory import STUDY_FILE, only_driver
from search.samplers import check_sampler
from search.stopping import stopping_rule
from search.study.baseline import read_baseline
from search.study.driver import Study
from search.study.report_writer import REPORT, Publisher
from search.terminal import StudyView, resumable, step_progress
from spaces.catalog_loader import load_space
from trials.data.cache import PreparedLog
from trials.distributed.process_group import check_devices
from trials.hosts.hosts import Hosts
from trials.hosts.run import HostsLauncher
from trials.processes.launcher import Launcher
from trials.record import StudyRecord

BEST = "best"


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
    _check_names(config)
    with only_driver(directory), other_hosts(config, console) as hosts:
        check_directory(directory, config)
        with step_progress(console) as progress:
            log = open_log(config, progress)
        record = _search(config, directory, log, launcher, hosts, console)
    for sentence in sentences(record):
        console.print(sentence, soft_wrap=True, markup=False)
    console.print(f"report: {directory / REPORT}\nbrowse: dhen-search ui {directory}", soft_wrap=True)
    if record.front:
        console.print(
            f"bundle: {directory / BEST} (dhen-search predict {directory / BEST} --data ...)", soft_wrap=True
        )


def _search(
    config: StudyConfig,
    directory: Path,
    log: PreparedLog,
    launcher: Launcher,
    hosts: Hosts | None,
    console: Console,
) -> StudyRecord:
    """The study and its best one's bundle, with the terminal, the report and MLflow following it."""
    publisher = Publisher(directory, console)
    with StudyView(console) as view:
        starts = HostsLauncher(launcher, hosts) if hosts else launcher
        study = Study(config, directory, log, starts, view, publisher)
        write_config(directory, config)
        try:
            with resumable(console, directory):
                if hosts:
                    hosts.open(log, directory)
                    hosts.wait_for_all()
                record = study.run()
                if record.front:
                    export(record, log, "best", directory / BEST)
                return record
        finally:
            publisher.finish(study.record())


def _check_names(config: StudyConfig) -> None:
    """What is misspelt is said before the log is read, which may take long."""
    check_sampler(config.sampler)
    stopping_rule(config.stopping)
    load_space(config.space)
    read_baseline(config)


@contextlib.contextmanager
def other_hosts(config: StudyConfig, console: Console) -> Iterator[Hosts | None]:
    """Those that join the study, who wait until it lets them; None where all ranks are on this machine.

    Raises:
        UserError: for an address that is none of this machine's, or where it has too few devices.
    """
    if config.address is None:
        yield None
        return

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    assert config.declared_ranks is not None
    count, ranks_a_host = config.declared_ranks
    check_devices(ranks_a_host)
    hosts = Hosts(config.address, count, ranks_a_host, say)
    reason = "it was broken off on its first host"
    try:
        yield hosts
        reason = "all trials are done"
    finally:
        hosts.close(reason)


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
