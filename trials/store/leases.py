"""Leases of one study's drivers: what each of them alone may do, for as long as it lives.

A driver is a row whose `beats` it adds to every few seconds. Who sees another one's beats stand still for
`SILENT_SECONDS` of its own clock, while the database answered all the time, takes it for dead: no two machines'
clocks are compared, and none has to be right. A dead driver's row goes, and its leases go with it; what it would
still write, should it wake up, is refused, since every write of a driver needs its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import sqlalchemy as sa

from dhen.errors import UserError
from trials.store.database import Database, patient
from trials.store.schema import DRIVERS, LEASES

BEAT_SECONDS = 2.0
"""Seconds between two beats of a driver."""
SILENT_SECONDS = 20.0
"""Seconds without a beat after which a driver is taken for dead."""
TRIAL, TURN, LEAD, REPORT = "trial", "turn", "lead", "report"
"""What a lease is of."""


class TakenForDeadError(UserError):
    """This driver was taken for dead, and others go on with its work."""


class Driver(NamedTuple):
    """A driver of a study."""

    id: int
    host: str
    process: str
    """Process that it is, on its machine."""
    directory: str
    """Run directory that it works in."""
    beats: int


class Leases:
    """The drivers of one study, and the leases of the one that registers here."""

    def __init__(
        self, database: Database, study: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Leases in a ledger's database; nothing is written before `register`."""
        self.database, self._study, self._clock = database, study, clock
        self.driver = 0
        """Number of the driver that has registered here."""
        self._seen: dict[int, tuple[int, float]] = {}
        """The beats of other drivers, and when they were seen to change."""
        self._looked = float("-inf")

    def register(self, host: str, process: str, directory: str) -> None:
        """Makes this process a driver of the study."""
        values = {"study": self._study, "host": host, "process": process, "directory": directory, "beats": 0}
        with self.database.transaction() as connection:
            row = connection.execute(sa.insert(DRIVERS).values(**values).returning(DRIVERS.c.id)).one()
        self.driver = int(row.id)

    def leave(self) -> None:
        """Ends this driver; its leases are free at once."""
        with self.database.transaction() as connection:
            connection.execute(sa.delete(DRIVERS).where(DRIVERS.c.id == self.driver))

    def beat(self) -> None:
        """Shows others that this driver lives."""
        mine = sa.update(DRIVERS).where(DRIVERS.c.id == self.driver)
        with self.database.transaction() as connection:
            connection.execute(mine.values(beats=DRIVERS.c.beats + 1))

    @patient
    def others(self) -> list[Driver]:
        """Returns the study's other drivers, dead or alive."""
        query = sa.select(*(DRIVERS.c[name] for name in Driver._fields)).order_by(DRIVERS.c.id)
        query = query.where(DRIVERS.c.study == self._study, DRIVERS.c.id != self.driver)
        with self.database.transaction() as connection:
            return [Driver(*row) for row in connection.execute(query)]

    def silent(self, others: Collection[Driver]) -> list[Driver]:
        """Returns those of the study's other drivers, as they are now, whose beats have long stood still."""
        now = self._clock()
        if now - self._looked > SILENT_SECONDS / 2:
            self._seen.clear()  # who could not look cannot tell: the database may have been away for all
        self._looked = now
        before, self._seen = self._seen, {}
        for other in others:
            beats, since = before.get(other.id, (None, now))
            self._seen[other.id] = (other.beats, since if beats == other.beats else now)
        return [other for other in others if now - self._seen[other.id][1] >= SILENT_SECONDS]

    def bury(self, connection: sa.Connection, dead: Driver) -> tuple[int, ...] | None:
        """Removes a driver and returns the numbers of the trials that it ran; None if it lives after all, or
        another driver was first."""
        as_seen = (DRIVERS.c.id == dead.id) & (DRIVERS.c.beats == dead.beats)
        # locked first: what it would still take meanwhile waits, and is refused
        if connection.execute(sa.select(DRIVERS.c.id).where(as_seen).with_for_update()).first() is None:
            return None
        its = (LEASES.c.driver == dead.id) & (LEASES.c.what == TRIAL)
        trials = tuple(connection.scalars(sa.select(LEASES.c.number).where(its).order_by(LEASES.c.number)))
        connection.execute(sa.delete(DRIVERS).where(DRIVERS.c.id == dead.id))
        return trials

    @patient
    def claim(self, what: str) -> bool:
        """Takes a lease, and says whether this driver has it."""
        with self.database.transaction() as connection:
            self.check(connection)
            return self._claimed(connection, what, 0)

    @patient
    def release(self, what: str) -> None:
        """Lets go of a lease."""
        mine = (LEASES.c.study == self._study) & (LEASES.c.what == what) & (LEASES.c.driver == self.driver)
        with self.database.transaction() as connection:
            connection.execute(sa.delete(LEASES).where(mine))

    def hold(self, connection: sa.Connection, number: int, *, running: bool) -> None:
        """Takes the lease of a trial that this driver runs, or lets go of one that has ended.

        Raises:
            TakenForDeadError: if this driver may not write any more.
        """
        self.check(connection)
        if running:
            taken = self._claimed(connection, TRIAL, number)
            assert taken, f"trial {number} is run by another driver"
            return
        its = (LEASES.c.study == self._study) & (LEASES.c.what == TRIAL) & (LEASES.c.number == number)
        connection.execute(sa.delete(LEASES).where(its))

    def check(self, connection: sa.Connection) -> None:
        """Checks that this driver lives for the others too, and keeps it so until the transaction ends.

        Raises:
            TakenForDeadError: if it does not.
        """
        mine = sa.select(DRIVERS.c.id).where(DRIVERS.c.id == self.driver)
        if connection.execute(mine.with_for_update(read=True, key_share=True)).first() is None:
            raise TakenForDeadError(
                f"the other drivers of study {self._study!r} took this one for dead, since it gave no sign for "
                f"{SILENT_SECONDS:.0f} seconds, and go on with its candidates; the same command joins them again."
            )

    @patient
    def held(self) -> dict[tuple[str, int], int]:
        """Returns the driver of each lease of the study, by what it is of."""
        query = sa.select(LEASES.c.what, LEASES.c.number, LEASES.c.driver)
        with self.database.transaction() as connection:
            rows = connection.execute(query.where(LEASES.c.study == self._study))
            return {(what, number): driver for what, number, driver in rows}

    def _claimed(self, connection: sa.Connection, what: str, number: int) -> bool:
        key = {"study": self._study, "what": what, "number": number}
        self.database.insert_new(connection, LEASES, **key, driver=self.driver)
        its = (LEASES.c.study == self._study) & (LEASES.c.what == what) & (LEASES.c.number == number)
        return connection.scalar(sa.select(LEASES.c.driver).where(its)) == self.driver
