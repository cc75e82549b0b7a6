"""Opens a finished study once more, for its winners to be retrained; its report and its bundle are written anew at
the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dhen.errors import UserError
from search.bundles.export import export
from search.config import StudyConfig, written_config
from search.execution.parallelism import Parallelism
from search.execution.retraining import Retrainings
from search.execution.trainer import Trainer
from search.planning.attempts import execution
from search.read_study import read_finished_study, read_study
from search.retrainings_view import RetrainingsView
from search.run_directory import BEST, database_url, study_name
from search.session import Session, open_session
from search.study.report_writer import ReportWriter
from search.study.settings import StudySettings
from search.terminal import resumable
from spaces.catalog_loader import load_space
from trials.data.cache import PreparedLog
from trials.processes.launcher import Launcher
from trials.storage.disk_full import is_disk_full
from trials.storage.ledger import Ledger
from trials.study_record import StudyRecord


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
        UserError: where the study is not finished, another process drives it, or it does not fit its settings.
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
                    retrainings = _retrainings(config, session, ledger, view, shares)
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


def _retrainings(
    config: StudyConfig, session: Session, ledger: Ledger, view: RetrainingsView, shares: Parallelism
) -> Retrainings:
    """The study's retrainings, trained as its trials were: with the same ranks, precision and memory."""
    directory, log = session.directory, session.log
    settings = StudySettings(
        ledger,
        config,
        directory,
        log,
        load_space(config.space, log.features),
        side_by_side=shares.sharing,
        threads=shares.threads,
    )
    ledger.settle(settings.setting)
    trainer = Trainer(
        session.launcher,
        log,
        directory,
        threads=shares.threads,
        precision=settings.precision,
        execution=execution(config, *settings.clusters, threads=shares.threads),
        ranks_at_once=shares.ranks,
    )

    return Retrainings(
        ledger, trainer, side_by_side=shares.side_by_side, on_change=view.changed, watcher=view.watcher
    )
