"""Opens a session in a folder: its lock, its log, the hosts that join it; the same for studies, tables and
audits."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from dhen.errors import UserError
from search.config import LogConfig, StudyConfig, check_directory
from search.dataset import open_log
from search.logs import logged_to
from search.run_directory import DRIVER_LOG, only_driver, only_writer, study_name
from search.terminal import print_notes, step_progress
from trials.data.cache import PreparedLog
from trials.distributed.process_group import check_devices
from trials.hosts.hosts import Hosts
from trials.hosts.run import HostsLauncher
from trials.processes.launcher import AnyLauncher, Launcher

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """A folder that this process holds, and what it works with there."""

    directory: Path
    log: PreparedLog
    launcher: AnyLauncher
    """What starts processes here, or on all hosts."""
    hosts: Hosts | None
    """Other hosts, which wait until `admit_hosts` lets them begin; None where all ranks are on this machine."""

    def admit_hosts(self) -> None:
        """Waits until all hosts have joined; nothing to do where all ranks are on this machine."""
        if self.hosts is not None:
            self.hosts.open(self.log, self.directory)
            self.hosts.wait_for_all()


@contextlib.contextmanager
def open_session(
    directory: Path,
    config: LogConfig,
    launcher: Launcher,
    console: Console,
    *,
    shared: bool = False,
    joins: bool = False,
) -> Iterator[Session]:
    """Holds a folder, opens the log that `config` names, and lets other hosts join where a study asks for them.

    Args:
        directory: the folder.
        config: settings, of which the log is opened.
        launcher: starts processes.
        console: where it is said how far a log is that has to be prepared.
        shared: whether further drivers may join this one.
        joins: whether this is a further driver of a study, which its ledger holds to its settings.

    Raises:
        UserError: where the folder is a file, holds something else than this study, or another process is at work
            there; for anything wrong with the log; for an address that is none of this machine's.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory} is a file; give a folder, new or of an earlier session.")
    study = config if isinstance(config, StudyConfig) else None
    storage, name = (study.storage, study_name(directory, study.name)) if study is not None else (None, "")
    with (
        only_driver(directory, shared=shared, joins=joins),
        only_writer(storage, name),
        _other_hosts(study, console) as hosts,
    ):
        if study is not None and not joins:
            check_directory(directory, study)
        with step_progress(console) as progress:
            log = open_log(config, progress)
        print_notes(console, log.notes)
        session_launcher = HostsLauncher(launcher, hosts) if hosts else launcher
        with logged_to(directory / DRIVER_LOG):
            LOG.info(
                "dhen-search %s, process %d, log %s", version("dhen-search"), os.getpid(), log.fingerprint
            )
            yield Session(directory=directory, log=log, launcher=session_launcher, hosts=hosts)


@contextlib.contextmanager
def _other_hosts(config: StudyConfig | None, console: Console) -> Iterator[Hosts | None]:
    """The hosts that join a study; None where all ranks are on this machine.

    Raises:
        UserError: for an address that is none of this machine's, or where it has too few devices.
    """
    if config is None or config.address is None:
        yield None
        return

    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    assert config.declared_ranks is not None
    count, ranks_per_host = config.declared_ranks
    check_devices(ranks_per_host)
    hosts = Hosts(config.address, count, ranks_per_host, say)
    reason = "it was broken off on its first host"
    try:
        yield hosts
        reason = "all trials are done"
    finally:
        hosts.close(reason)
