"""One session after a finished study: what its winners are retrained with, and what is written at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dashboards.sentences.winners import retrained_line
from dhen.errors import UserError
from search.bundles.export import export
from search.config import StudyConfig, written_config
from search.dataset import open_log
from search.execution.parallelism import slots
from search.execution.retraining import Retrainings
from search.execution.trainer import Trainer
from search.planning.attempts import execution, ranks_here
from search.run_directory import database_url, only_driver, read_record, study_name
from search.study.report_writer import Publisher
from search.study.run_session import BEST, other_hosts
from search.study.settings import Facts
from search.terminal import resumable, step_progress
from spaces.catalog_loader import load_space
from trials.data.cache import PreparedLog
from trials.hosts.run import HostsLauncher
from trials.processes.launcher import Launcher
from trials.record import Retraining, StudyRecord
from trials.storage.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished study, opened for its winners to be retrained; nobody else drives it meanwhile."""

    config: StudyConfig
    record: StudyRecord
    log: PreparedLog
    ledger: Ledger
    retrainings: Retrainings


def finished_record(directory: Path) -> StudyRecord:
    """Of a study whose selection is frozen.

    Raises:
        UserError: where there is none, or it is not finished.
    """
    record = read_record(directory)
    if not record.finished:
        raise UserError(
            f"{directory}: the study is not finished, and winners are compared when selection is frozen; "
            f"`dhen-search run --out {directory}` goes on, trials= and minutes= say how far."
        )
    return record


@contextlib.contextmanager
def finished_study(directory: Path, console: Console) -> Iterator[Finished]:
    """The study in a run directory; the report, MLflow and the best one's bundle are written anew at the end.

    Ctrl-C ends what trains, and then this process (exit code 130); the same command goes on from there.

    Raises:
        UserError: where it is not finished, another process drives it, or it does not fit its settings.
    """
    if finished_record(directory).running:  # before anything is locked, opened or written
        raise UserError(f"{directory}: another process is running this study; wait for it to end.")
    config = written_config(directory)
    launcher = Launcher(several_ranks=config.ranks is not None)
    launcher.warm_up()
    try:
        with resumable(console, directory):
            with only_driver(directory), other_hosts(config, console) as hosts:
                record = finished_record(directory)
                with step_progress(console) as progress:
                    log = open_log(config, progress)
                starts = HostsLauncher(launcher, hosts) if hosts else launcher
                ledger = Ledger(database_url(directory, config.storage), study_name(directory, config.name))
                with contextlib.closing(ledger):
                    retrainings = _retrainings(config, directory, log, ledger, starts, console)
                    if hosts:
                        hosts.open(log, directory)
                        hosts.wait_for_all()
                    yield Finished(
                        config=config, record=record, log=log, ledger=ledger, retrainings=retrainings
                    )
            export(read_record(directory), log, "best", directory / BEST)
    finally:
        Publisher(directory, console).finish(read_record(directory))


def _retrainings(
    config: StudyConfig,
    directory: Path,
    log: PreparedLog,
    ledger: Ledger,
    launcher: Launcher | HostsLauncher,
    console: Console,
) -> Retrainings:
    """Trained as the study's trials were: the same ranks, precision and memory."""
    parallel, threads = slots(config.parallel, config.threads, ranks_here(config))
    shares = {"side_by_side": parallel, "threads": threads}
    facts = Facts(ledger, config, directory, log, load_space(config.space, log.features), **shares)
    ledger.settle(facts.setting)
    trainer = Trainer(
        launcher,
        log,
        directory,
        threads=threads,
        precision=facts.precision,
        execution=execution(config, facts.cluster),
    )

    def watch(each: Retraining) -> None:
        console.print(retrained_line(each), soft_wrap=True, markup=False, highlight=False)

    return Retrainings(ledger, trainer, parallel=parallel, watch=watch)
