"""One study, several drivers: whose turn it is to propose, who does the end, who has died.

A trial is run by the driver that has its lease. What to train next is decided by one driver at a time, who has
the turn, from what all drivers have committed; so several propose what one would have proposed, and a number or
a proposal is never taken twice. What is no work for two, the end of a study above all, is for the driver that has
the lead. Leases go with their driver (`trials.storage.leases`): what one leaves, another takes up
(docs/decisions/0051-many-drivers.md).
"""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from dhen.errors import UserError
from search.drivers.process import in_words, is_gone, this_process
from search.execution.reduce_events import cut_short
from trials.record import TrialRecord
from trials.storage.leases import BEAT_SECONDS, LEAD, REPORT, TRIAL, TURN, Leases
from trials.storage.ledger import Changes, Ledger
from trials.storage.patience import PATIENCE_SECONDS

LOG = logging.getLogger(__name__)
SYNC_SECONDS = 1.0
"""Seconds between two looks at what other drivers have committed, and at whether they live."""
POLL_SECONDS = 0.25
"""Seconds after which a driver that waits for others asks again."""


class Lost(Protocol):
    """A function that returns a running trial as it stands once its driver has died."""

    def __call__(self, trial: TrialRecord, /, driver: str) -> TrialRecord:
        """`driver` says which one that was."""


class Sharing:
    """This driver's share in a study."""

    def __init__(self, ledger: Ledger, directory: Path, *, joins: bool) -> None:
        """Becomes a driver of the study; it takes part from `begin` on.

        Args:
            ledger: the study's ledger, which from now on writes for this driver.
            directory: run directory that this driver works in.
            joins: whether the study is begun or resumed by another driver.

        Raises:
            UserError: where another driver is at work on a study that this one would begin or resume.
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

    def begin(self, follow: Callable[[Changes], None], lost: Lost, say: Callable[[str], None]) -> None:
        """Takes part from now on.

        Args:
            follow: takes in what other drivers have committed.
            lost: says what becomes of a trial whose driver has died.
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
        """Has it said where this driver waits for the database's server."""
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
        where another has the turn."""
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
        self._bury()
        self._held = self._leases.held()
        changes = self._ledger.changes(self._revision)
        if changes is not None:
            self._revision = changes.revision
            self._follow(changes)

    def _bury(self) -> None:
        """Frees what dead drivers have left."""
        others = self._leases.others()
        dead = {driver.id: driver for driver in self._leases.silent(others)}
        dead |= {driver.id: driver for driver in others if is_gone(driver.process)}
        self.others = [driver for driver in others if driver.id not in dead]
        for driver in dead.values():
            name = in_words(driver.process, driver.host)
            lost = self._ledger.bury(driver, partial(self._lost, driver=name))
            LOG.warning("driver %d (%s) is dead, it ran %d trials", driver.id, name, len(lost))
            for trial in lost:
                self._say(f"trial {trial.number}: its driver died ({name})")

    def _refuse_a_second(self) -> None:
        """Raises UserError where another driver gives a sign; one that does not for long enough is dead."""
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
