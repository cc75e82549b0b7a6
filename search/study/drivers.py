"""One study, several drivers: whose turn it is to propose, who does the end, who has died.

A trial is run by the driver that has its lease. What to train next is decided by one driver at a time, who has
the turn, from what all drivers have committed; so several propose what one would have proposed, and a number
or a proposal is never taken twice. What is no work for two, the end of a study above all, is for the driver
that has the lead. Leases go with their driver (`trials.store.leases`): what one leaves, another takes up
(docs/decisions/0012-the-ledger-and-its-drivers.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.exc import ArgumentError

from dhen.errors import UserError
from dhen.values import parse
from search.config import ADDRESSES, StudyConfig, written_config
from search.execution.reduce_events import cut_short
from search.log_config import set_override
from search.read_study import HEAD, run_directory_of, stored_studies
from trials.records.places import LOCAL
from trials.records.trial_record import TrialRecord
from trials.store.database import PATIENCE_SECONDS, masked, parsed_url
from trials.store.leases import BEAT_SECONDS, LEAD, REPORT, TRIAL, TURN, Leases
from trials.store.ledger import Changes, Ledger

# How a further driver joins a study: it finds the study in its database, its settings, and a run directory.

SETTINGS = "settings"
"""Key of the facts that holds the settings with which the study was begun, for drivers that join it."""
WRITTEN = "written"
"""Key of the facts that says whether the end of a study with several drivers is in its report and in MLflow."""
OWN_KEYS = ("parallel", "threads", "tracking", "optuna")
"""Settings that a further driver may have of its own: what its machine takes, and where other services are."""


class JoinedStudy(NamedTuple):
    """A study that is joined."""

    config: StudyConfig
    directory: Path
    """The run directory to work in."""
    elsewhere: str | None
    """Run directory of the study, if it is not on this machine."""


def for_other_drivers(config: StudyConfig) -> dict[str, Any]:
    """The settings of a study as its ledger keeps them: without the address of the ledger itself, and without
    addresses that have a password."""
    return {
        key: None if key == "storage" or (key in ADDRESSES and value and masked(value) != value) else value
        for key, value in config.to_dict().items()
    }


def join(
    url: str, name: str | None, out: Path | None, data: Sequence[str], overrides: Iterable[str]
) -> JoinedStudy:
    """Finds a study that has begun, for one more driver of it.

    Args:
        url: the study's database.
        name: the study's name there; None if it is the only one.
        out: the run directory; by default the study's own, if it is on this machine.
        data: files of the log, if they have other names here.
        overrides: `key=value` words of what this driver may have of its own.

    Raises:
        UserError: for a database that takes one driver alone, has no such study, or several to choose from; for a
            setting that all drivers of a study share.
    """
    _check_server(url)
    studies = stored_studies(url, name)
    if len(studies) > 1:
        names = ", ".join(study.name for study in studies)
        raise UserError(f"the database holds several studies ({names}); say with --name which one to join.")
    (study,) = studies
    with contextlib.closing(Ledger(url, study.name, create=False)) as ledger:
        facts = ledger.facts() or {}
    if facts.get(HEAD, {}).get("finished") and facts.get(WRITTEN, True):
        raise UserError(
            f"study {study.name!r} is finished; `dhen-search run` with its run directory and more trials= or "
            "minutes= goes on, and then takes further drivers."
        )
    home = run_directory_of(url, study)
    if home is not None and out is None:
        out = home
    at_home = home is not None and out is not None and out.resolve() == home.resolve()
    settings: dict[str, Any] | None
    settings = written_config(home).to_dict() if home is not None else facts.get(SETTINGS)
    if settings is None:
        raise UserError(
            f"study {study.name!r} was begun by a version that leaves no settings for other drivers, and its run "
            "directory is not on this machine; start the worker where it is."
        )
    if settings.get("launcher") != LOCAL:
        raise UserError(
            f"study {study.name!r} trains on the hosts of a Ray cluster (launcher={settings['launcher']}), which "
            "its one driver reserves; with launcher=local it takes several."
        )
    for word in overrides:
        key = word.partition("=")[0]
        if key not in OWN_KEYS:
            raise UserError(
                f"{masked(word)!r}: all drivers of a study share its settings; a further one may have its own "
                f"{', '.join(OWN_KEYS)}."
            )
        set_override(settings, word)
    settings |= {"storage": url, "name": study.name} | ({"data": list(data)} if data else {})
    return JoinedStudy(
        config=parse(StudyConfig, settings, f"the settings of study {study.name}"),
        directory=out or Path("runs") / study.name,
        elsewhere=None if at_home else study.directory,
    )


def _check_server(url: str) -> None:
    """Raises UserError for a database that takes one driver."""
    try:
        kind = parsed_url(url).get_backend_name()
    except ArgumentError:
        return  # opening it says what is wrong
    if kind == "sqlite":
        raise UserError(
            f"{masked(url)}: a SQLite database takes one driver; a study with several has its ledger on "
            "PostgreSQL: `dhen-search run storage=postgresql://user@host/studies` begins one."
        )


# Which process a driver is, in words that another process of the same machine can look it up by.

BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")
DEAD = "ZXx"
"""States of a process that has ended, and whose parent has not heard of it yet."""


def this_process() -> str:
    """This process: the boot of its machine, its namespace of processes, its number, when it began.

    If the system does not tell, only the number is there, and nobody can look the process up.
    """
    try:
        return " ".join((*_machine(), str(os.getpid()), _stat(os.getpid())[1]))
    except OSError:
        return str(os.getpid())


def is_gone(process: str) -> bool:
    """Whether a process is known to have ended: one of another machine, or of another container, never is."""
    try:
        *machine, number, began = process.split()
        if tuple(machine) != _machine():
            return False
    except (OSError, ValueError):
        return False
    try:
        state, start = _stat(int(number))
    except OSError:
        return True
    return start != began or state in DEAD


def in_words(process: str, host: str) -> str:
    """A process of a host, as people may look it up."""
    words = process.split()
    return f"process {words[2] if len(words) == 4 else process} on {host}"


def _machine() -> tuple[str, str]:
    return BOOT.read_text().strip(), os.readlink(NAMESPACE)


def _stat(number: int) -> tuple[str, str]:
    """Returns a process's state, and the tick of the machine's clock at which it began."""
    # the name, in brackets, may have spaces and brackets itself
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


LOG = logging.getLogger(__name__)
SYNC_SECONDS = 1.0
"""Seconds between two looks at what other drivers have committed, and at whether they live."""
POLL_SECONDS = 0.25
"""Seconds after which a driver that waits for others asks again."""


class Sharing:
    """This driver's share in a study."""

    def __init__(self, ledger: Ledger, directory: Path, *, joins: bool) -> None:
        """Becomes a driver of the study; it takes part from `begin` on.

        Args:
            ledger: the study's ledger, which from now on writes for this driver.
            directory: run directory that this driver works in.
            joins: whether the study is begun or resumed by another driver.

        Raises:
            UserError: if another driver is at work on a study that this one would begin or resume.
        """
        self._ledger, self._directory = ledger, directory.resolve()
        self.joins = joins
        self._leases = Leases(ledger.database, ledger.study)
        self._leases.register(platform.node(), this_process(), str(self._directory))
        ledger.leases = self._leases
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beats.start()
        self._due = 0.0
        try:
            self.others = [driver for driver in self._leases.others() if not is_gone(driver.process)]
            """Other drivers that live, as far as is known."""
            if self.others and not joins:
                self._refuse_a_second()
            self._revision = ledger.revision()
            self._held = self._leases.held()
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        follow: Callable[[Changes], None],
        lost: Callable[[str, TrialRecord], TrialRecord],
        say: Callable[[str], None],
    ) -> None:
        """Takes part from now on.

        Args:
            follow: takes in what other drivers have committed.
            lost: words what becomes of a trial whose driver has died.
            say: says a sentence to whoever watches this driver.
        """
        self._follow, self._lost, self._say = follow, lost, say
        self._ledger.database.patience_seconds = PATIENCE_SECONDS
        self.sync()

    def close(self) -> None:
        """Ends this driver's share; what it still has is free at once."""
        self._ended.set()
        self.lose_patience()
        self._beats.join()
        with contextlib.suppress(UserError):  # else it is taken for dead soon
            for trial in self.running():
                self._ledger.save(cut_short(trial))
            self._leases.leave()
        self._ledger.leases = None
        self._ledger.close()

    def say_waits(self, say: Callable[[str], None]) -> None:
        """Has it said if this driver waits for the database's server."""
        self._ledger.database.say = say

    def lose_patience(self) -> None:
        """Waits for the database's server no longer: this driver is about to end."""
        self._ledger.database.patience_seconds = 0.0

    def running(self) -> list[TrialRecord]:
        """The trials that this driver runs, as the ledger has them."""
        mine = {
            number
            for (what, number), driver in self._leases.held().items()
            if (what, driver) == (TRIAL, self._leases.driver)
        }
        return [trial for trial in self._ledger.running() if trial.number in mine] if mine else []

    def as_it_stands(self, trial: TrialRecord) -> TrialRecord:
        """A trial of the ledger: a running one that no driver runs is cut short."""
        return trial if (TRIAL, trial.number) in self._held else cut_short(trial)

    @property
    def led_elsewhere(self) -> bool:
        """Whether another driver does what is no work for two."""
        return self._held.get((LEAD, 0), self._leases.driver) != self._leases.driver

    @property
    def leads(self) -> bool:
        """Whether this driver does what is no work for two."""
        return self._held.get((LEAD, 0)) == self._leases.driver

    @property
    def run_elsewhere(self) -> frozenset[int]:
        """Numbers of the trials that other drivers run."""
        me = self._leases.driver
        return frozenset(
            number for (what, number), driver in self._held.items() if what == TRIAL and driver != me
        )

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """This driver's turn, in which it knows all that was committed, and alone decides what is next; False
        if another has the turn."""
        mine = self._leases.claim(TURN)
        try:
            self.sync(at_once=mine)
            yield mine
        finally:
            if mine:
                self._leases.release(TURN)

    def take_lead(self) -> None:
        """Takes the lead, at this driver's turn, in which nobody else has it."""
        taken = self._leases.claim(LEAD)
        assert taken, "another driver leads"
        self.sync(at_once=True)

    def leave_lead(self) -> None:
        """Lets another driver lead."""
        self._leases.release(LEAD)
        self.sync(at_once=True)

    def take_report(self) -> bool:
        """Whether this driver writes the report and MLflow's runs, which one driver does at a time."""
        return self._leases.claim(REPORT)

    def leave_report(self) -> None:
        """Lets another driver write the report."""
        self._leases.release(REPORT)

    def sync(self, *, at_once: bool = False) -> None:
        """Takes in what other drivers have committed, and frees what a dead one has left, once in a while."""
        now = time.monotonic()
        if not at_once and now < self._due:
            return
        self._due = now + SYNC_SECONDS
        self._remove_dead_drivers()
        self._held = self._leases.held()
        changes = self._ledger.changes(self._revision)
        if changes is not None:
            self._revision = changes.revision
            self._follow(changes)

    def _remove_dead_drivers(self) -> None:
        """Frees what dead drivers have left."""
        others = self._leases.others()
        dead = {driver.id: driver for driver in self._leases.silent(others)}
        dead |= {driver.id: driver for driver in others if is_gone(driver.process)}
        self.others = [driver for driver in others if driver.id not in dead]
        for driver in dead.values():
            name = in_words(driver.process, driver.host)
            lost = self._ledger.bury(driver, partial(self._lost, name))
            LOG.warning("driver %d (%s) is dead, it ran %d trials", driver.id, name, len(lost))
            for trial in lost:
                self._say(f"trial {trial.number}: its driver died ({name})")

    def _refuse_a_second(self) -> None:
        """Raises UserError if another driver gives a sign; one that does not for long enough is dead."""
        first = {driver.id: driver.beats for driver in self.others}
        while self.others:
            for driver in self.others:
                if driver.beats != first.get(driver.id):
                    raise UserError(
                        f"study {self._ledger.study!r} is under way already, in {driver.directory} on "
                        f"{driver.host}; `dhen-search worker --study URL` gives it one more driver, and another "
                        "name= begins another study."
                    )
            time.sleep(SYNC_SECONDS)
            others = self._leases.others()
            silent = self._leases.silent(others)
            self.others = [
                driver for driver in others if driver not in silent and not is_gone(driver.process)
            ]

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._leases.beat()
            except UserError as error:
                LOG.warning("no beat: %s", error)
