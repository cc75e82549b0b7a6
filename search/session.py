"""Opens a session in a folder: its lock, its log, its hosts; the same for studies, tables and audits."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from dhen.errors import UserError
from search.config import StudyConfig, check_directory
from search.dataset import log_getter, open_log, open_study_log
from search.execution.attempts import Parallelism, most_servers, study_parallelism
from search.log_config import LogConfig
from search.logs import logged_to
from search.run_directory import DRIVER_LOG, STUDY_FILE, only_driver, only_writer, study_name
from search.terminal import print_columns, print_notes, step_progress
from trials.data.prepared_log import PreparedLog
from trials.records.places import LOCAL
from trials.runtime.hosts.hosts import Hosts, nodes_alive
from trials.runtime.hosts.placement import shape
from trials.runtime.hosts.ray_connection import connected
from trials.runtime.hosts.run import HostsLauncher
from trials.runtime.launcher import AnyLauncher, Launcher

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """A folder that this process holds, and what it works with there."""

    directory: Path
    log: PreparedLog
    launcher: AnyLauncher
    """What starts processes here, or on hosts of a Ray cluster."""
    hosts: Hosts | None
    """Hosts of a Ray cluster, which take part once `admit_hosts` has asked them; None if all ranks are on this
    machine."""
    config: LogConfig
    """The settings of what is done there, such as a study."""

    def shares(self, config: StudyConfig) -> Parallelism:
        """The shares that a study's trials have of this machine, or of the cluster's nodes as they are now."""
        return study_parallelism(config, None if self.hosts is None else self.hosts.head.ask(nodes_alive))

    def admit_hosts(self, shares: Parallelism) -> None:
        """Waits until the hosts take part; nothing to do if all ranks are on this machine.

        Args:
            shares: how many trials train at once, and with how many threads per rank.

        Raises:
            UserError: if fewer can than a candidate needs.
        """
        config = self.config
        if self.hosts is not None and isinstance(config, StudyConfig):
            self.hosts.open(self.log, self.directory, log_getter(config))
            self.hosts.on_device = shares.on_device
            for count, ranks_per_host in config.declared_ranks or ((1, 1),):
                servers = most_servers(config)
                self.hosts.check(shape(count, ranks_per_host, shares.threads, servers, shares.on_device))
            many = (
                f"up to {shares.side_by_side} candidates train"
                if shares.side_by_side > 1
                else "one candidate trains"
            )
            sharing = f", up to {shares.on_device} on a device" if shares.on_device > 1 else ""
            self.hosts.tell(
                f"{many} at once on the cluster's nodes{sharing}, with {shares.threads} thread(s) per rank"
            )


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
    """Holds a folder, opens the log that `config` names, and connects to the hosts that a study asks for.

    Args:
        directory: the folder.
        config: settings, of which the log is opened.
        launcher: starts processes.
        console: where the progress of a log is printed that has to be prepared.
        shared: whether further drivers may join this one.
        joins: whether this is a further driver of a study, which its ledger holds to its settings.

    Raises:
        UserError: if the folder is a file, holds something else than this study, or another process is at work
            there; for anything wrong with the log; if no Ray cluster answers that the study asks for.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory} is a file; give a folder, new or of an earlier session.")
    study = config if isinstance(config, StudyConfig) else None
    storage = study.storage if study is not None else None
    name = study_name(directory, study.name) if study is not None and storage is not None else ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_driver(directory, shared=shared, joins=joins))
        stack.enter_context(only_writer(storage, name))
        hosts = None
        if study is not None and study.launcher != LOCAL:
            head = stack.enter_context(connected(study.launcher))
            say = partial(console.print, soft_wrap=True, markup=False, highlight=False)
            hosts = stack.enter_context(contextlib.closing(Hosts(head, say)))
        if study is not None and not joins:
            check_directory(directory, study)
        begun = (directory / STUDY_FILE).exists()
        with step_progress(console) as progress:
            log = open_study_log(config, directory, progress) if begun else open_log(config, progress)
        if not begun and not all(map(PreparedLog.is_prepared, map(Path, config.data))):
            print_columns(console, log.manifest.findings)
        print_notes(console, log.notes)
        session_launcher = HostsLauncher(hosts) if hosts else launcher
        with logged_to(directory / DRIVER_LOG):
            LOG.info(
                "dhen-search %s, process %d, log %s", version("dhen-search"), os.getpid(), log.fingerprint
            )
            yield Session(directory=directory, log=log, launcher=session_launcher, hosts=hosts, config=config)
