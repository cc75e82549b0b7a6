"""One session of the main job: from the command's words to the report and the best candidate's bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from dashboards.sentences.summary import sentences
from dhen.atomic_write import remove_left_behind
from dhen.errors import UserError
from search.analysis.views import RetrainingsView
from search.bundles.export import export
from search.config import (
    StudyConfig,
    as_begun,
    check_directory,
    read_study_config,
    write_config,
    written_config,
)
from search.dataset import log_name
from search.execution.attempts import execution
from search.execution.clock import StudyClock
from search.execution.retraining import Retrainings
from search.execution.trainer import Trainer
from search.log_config import DEMO
from search.mlflow.store import server_of, store_uri, with_destination
from search.read_study import read_finished_study, read_study
from search.run_directory import BEST, REPORT, STUDY_FILE, database_url, network_file_system, study_name
from search.samplers import check_sampler
from search.samplers.stopping import stopping_rule
from search.session import Session, open_session
from search.study.drivers import JoinedStudy
from search.study.open_study import open_study
from search.study.report_writer import ReportWriter
from search.study.settings import StudySettings
from search.study.tuning import read_baseline
from search.terminal import StudyView, resumable
from spaces.space import load_space
from trials.data.prepared_log import PreparedLog
from trials.records.study_record import StudyRecord
from trials.runtime.launcher import Launcher
from trials.store.database import sqlite_file
from trials.store.ledger import Ledger
from trials.store.user_cache import is_disk_full

STUDY_SUFFIXES = (".yaml", ".yml", ".json", "")
MOUNTS = Path("/proc/mounts")
"""The mounted file systems of a Linux machine."""
"""How names of study files end; what ends otherwise may be a log of gigabytes, which is not read to find out."""


def run_session(
    words: tuple[str, ...],
    data: tuple[str, ...],
    out: Path | None,
    launcher: Launcher,
    clock: StudyClock | None = None,
    *,
    console: Console | None = None,
    quiet: bool = False,
    average_seeds: int = 1,
) -> StudyRecord:
    """Searches until the budget is spent, or Ctrl-C (exit code 130); the same words go on from there.

    Args:
        words: an optional study file, or the run directory of a study to go on with; then `key=value` words.
        data: files of the log.
        out: the run directory.
        launcher: starts processes.
        clock: runs since the command began; by default since now.
        console: where progress is printed; by default standard output, or stderr if `quiet`.
        quiet: whether stdout is left alone: the findings are the caller's.
        average_seeds: trainings of the best network that may be members of averages, each from its own seed.

    Returns:
        The study's record at the end.

    Raises:
        UserError: for whatever is wrong with the words, the log or the run directory.
    """
    clock, console = clock or StudyClock(), console or Console(stderr=quiet)
    file, overrides = _split_words(words)
    if file is not None and file.is_dir():
        if out is not None and out.resolve() != file.resolve():
            raise UserError(
                f"{file} is the run directory to go on with, and --out {out} another one: leave one out."
            )
        directory = file
        base: Path | None = file / STUDY_FILE
    else:
        if file is not None:
            directory = out or Path("runs") / file.stem
        else:
            directory = out or Path("runs") / (log_name(data) if data else DEMO)
        # the run directory's own settings are meant if no log is named, and it has settings
        own = directory / STUDY_FILE
        base = file or (own if not data and own.exists() else None)
    config = read_study_config(base, overrides, data=data or None)
    config = as_begun(with_destination(config, directory), directory)
    if config.most_trials is None and config.minutes is None and not config.knows_when_to_stop:
        raise UserError("a study needs a budget: give trials=N, minutes=M, both, or search_until=auto.")
    # names are checked before the log is read, which may take long
    check_sampler(config.sampler)
    stopping_rule(config.stopping)
    load_space(config.space)
    read_baseline(config)
    _warn_of_network_file_system(directory, config, console)
    shared = not database_url(directory, config.storage).startswith("sqlite")
    with open_session(directory, config, launcher, console, shared=shared) as session:
        record = _search(config, session, console, clock, average_seeds=average_seeds)
    if not quiet:
        _say_what_came_of_it(record, config, directory, console)
    return record


def _warn_of_network_file_system(directory: Path, config: StudyConfig, console: Console) -> None:
    if not MOUNTS.exists():  # no Linux
        return
    mounts = MOUNTS.read_text()
    urls = {
        "storage": database_url(directory, config.storage),
        "tracking": server_of(config) or store_uri(directory),
    }
    for key, url in urls.items():
        file = sqlite_file(url) if url.startswith("sqlite") else None
        kind = network_file_system(file, mounts) if file else None
        if kind is not None:
            console.print(
                f"warning: {file} lies on a network file system ({kind}). Its locks may fail, which can damage a "
                f"SQLite database. Pass {key}= with a file on a local disk (sqlite:////PATH) or a server, or "
                "another --out.",
                style="yellow",
                soft_wrap=True,
                markup=False,
            )


def join_session(
    joined: JoinedStudy, launcher: Launcher, clock: StudyClock, console: Console, *, quiet: bool = False
) -> StudyRecord:
    """Is one more driver of a study, until it is finished, or Ctrl-C (exit code 130); the other drivers go on.

    Args:
        joined: the study, and the run directory to work in.
        launcher: starts processes.
        clock: runs since the command began.
        console: where progress is printed.
        quiet: whether the findings are the caller's to say.

    Raises:
        UserError: for whatever is wrong with the log, the run directory, or the study's database.
    """
    config, directory = joined.config, joined.directory
    if joined.elsewhere is not None:
        check_directory(directory, config)
        console.print(
            f"the study's run directory {joined.elsewhere} is not on this machine: this driver keeps what it "
            f"trains in {directory}, and candidates of drivers that die begin anew here.",
            soft_wrap=True,
        )
    with open_session(directory, config, launcher, console, shared=True, joins=True) as session:
        record = _search(config, session, console, clock, joined)
    if not quiet:
        _say_what_came_of_it(record, config, directory, console)
    return record


def _say_what_came_of_it(record: StudyRecord, config: StudyConfig, directory: Path, console: Console) -> None:
    for sentence in sentences(record):
        console.print(sentence, soft_wrap=True, markup=False)
    server = server_of(config)
    browse = f"dhen-search ui {directory}"
    if server:
        browse = f"mlflow ui --backend-store-uri {server}" if server.startswith("sqlite") else server
    console.print(f"report: {directory / REPORT}\nbrowse: {browse}", soft_wrap=True)
    if record.front:
        console.print(
            f"bundle: {directory / BEST} (dhen-search predict {directory / BEST} --data ...)", soft_wrap=True
        )


def _search(
    config: StudyConfig,
    session: Session,
    console: Console,
    clock: StudyClock,
    joined: JoinedStudy | None = None,
    *,
    average_seeds: int = 1,
) -> StudyRecord:
    """Runs the study and exports its best, while the terminal, the report and MLflow follow it."""
    directory, log, shares = session.directory, session.log, session.shares(config)
    report_writer = ReportWriter(directory, config, console)
    with StudyView(console) as view:
        observers = (view, report_writer)
        study = open_study(
            config,
            directory,
            log,
            session.launcher,
            observers,
            clock=clock,
            joins=joined is not None,
            shares=shares,
            average_seeds=average_seeds,
        )
        report_writer.sharing = study.sharing
        if study.sharing is not None:
            study.sharing.say_waits(partial(console.print, style="yellow", soft_wrap=True, markup=False))
        if joined is None or joined.elsewhere is not None:
            write_config(directory, config)
        try:
            with resumable(console, directory):
                session.admit_hosts(shares)
                record = study.run()
                if record.front and study.does_the_end:
                    remove_left_behind(directory / BEST)
                    export(record, log, "best", directory / BEST)
        except BaseException as error:
            # on a full disk the report would find no space either, and its error would hide which file was first
            if not is_disk_full(error):
                report_writer.finish(study.record())
            raise
        else:
            report_writer.finish(study.record())
            study.note_written()
            return record
        finally:
            if study.sharing is not None:
                study.sharing.close()


def _split_words(words: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Splits words into an optional study file or run directory, which comes first, and `key=value` words."""
    if not words or "=" in words[0]:
        return None, list(words)
    file = Path(words[0])
    is_run = (file / STUDY_FILE).exists()
    if not is_run and (file.is_dir() or (file.exists() and file.suffix not in STUDY_SUFFIXES)):
        raise UserError(
            f"{file}: a study file is YAML, and the directory of a run has a {STUDY_FILE}. A log is given as "
            f"--data {file}; several files each with a --data of its own, or as a pattern in quotes."
        )
    return file, list(words[1:])


# Opens a finished study once more, for its winners to be retrained; its report and its bundle are written anew
# at the end.


@dataclass(frozen=True, kw_only=True)
class FinishedStudy:
    """A finished study, opened for its winners to be retrained; nobody else drives it meanwhile."""

    config: StudyConfig
    record: StudyRecord
    log: PreparedLog
    ledger: Ledger
    retrainings: Retrainings


@contextlib.contextmanager
def finished_study(directory: Path, console: Console) -> Iterator[FinishedStudy]:
    """The study in a run directory; the report, MLflow and the bundle of the best are written anew at the end.

    Ctrl-C ends what trains, and then this process (exit code 130); the same command goes on from there.

    Raises:
        UserError: if the study is not finished, another process drives it, or it does not fit its settings.
    """
    if read_finished_study(directory).running:  # before anything is locked, opened or written
        raise UserError(f"{directory}: another process is running this study; wait for it to end.")
    config = written_config(directory)
    launcher = Launcher(several_ranks=config.ranks is not None)
    launcher.warm_up()
    try:
        with resumable(console, directory):
            with open_session(directory, config, launcher, console) as session:
                record = read_finished_study(directory)
                ledger = Ledger(database_url(directory, config.storage), study_name(directory, config.name))
                with contextlib.closing(ledger), RetrainingsView(console) as view:
                    shares = session.shares(config)
                    space = load_space(config.space, session.log.features)
                    settings = StudySettings(ledger, config, directory, session.log, space, shares)
                    ledger.settle(settings.setting)
                    # trained as its trials were: with the same ranks, precision and memory
                    trainer = Trainer(
                        session.launcher,
                        session.log,
                        directory,
                        threads=shares.threads,
                        precision=settings.precision,
                        execution=execution(config, *settings.clusters, threads=shares.threads),
                        ranks_at_once=shares.ranks,
                    )
                    retrainings = Retrainings(
                        ledger, trainer, side_by_side=shares.side_by_side, watcher=view.watcher
                    )
                    session.admit_hosts(shares)
                    yield FinishedStudy(
                        config=config, record=record, log=session.log, ledger=ledger, retrainings=retrainings
                    )
            export(read_study(directory), session.log, "best", directory / BEST)
    except BaseException as error:
        if not is_disk_full(error):  # else the report would find no space either
            ReportWriter(directory, config, console).finish(read_study(directory))
        raise
    ReportWriter(directory, config, console).finish(read_study(directory))
