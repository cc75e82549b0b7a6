"""Which studies a database holds, and a cheap answer to whether one of them has changed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from trials.record import Outcome
from trials.storage.database import Database, sqlite_file
from trials.storage.schema import COMPARISONS, METADATA, RETRAININGS, STUDIES, TRIALS

SQLITE_FILES = ("", "-wal", "-journal")
"""What is added to the name of a SQLite file for those that a commit writes to."""


class StoredStudy(NamedTuple):
    """A study that a database holds."""

    name: str
    directory: str | None
    """Run directory that it was begun in, maybe on another machine; None before anything was trained."""


class Studies:
    """The studies of one database, for readers: nothing is created and nothing is written."""

    def __init__(self, url: str) -> None:
        """Opens the database.

        Raises:
            UserError: when it is of another kind, or out of reach.
        """
        self._database = Database(url, METADATA, create=False)
        self._file = sqlite_file(url)

    def close(self) -> None:
        """Releases the database."""
        self._database.close()

    def all(self) -> tuple[StoredStudy, ...]:
        """Returns the studies that have begun, in the order of their names.

        Raises:
            UserError: when the database cannot be read, or has other tables.
        """
        begun = sa.exists().where(TRIALS.c.study == STUDIES.c.name)
        query = sa.select(STUDIES.c.name, STUDIES.c.directory).where(begun).order_by(STUDIES.c.name)
        with self._database.transaction() as connection:
            return tuple(StoredStudy(*row) for row in connection.execute(query))

    def names(self) -> tuple[str, ...]:
        """Returns the names of all studies, of those too that have not trained anything.

        Raises:
            UserError: when the database cannot be read, or has other tables.
        """
        with self._database.transaction() as connection:
            return tuple(connection.scalars(sa.select(STUDIES.c.name)))

    def running(self, study: str) -> tuple[int, ...]:
        """Returns the numbers of the trials that were last written as running.

        Raises:
            UserError: when the database cannot be read.
        """
        running = (TRIALS.c.study == study) & (TRIALS.c.outcome == Outcome.RUNNING.value)
        with self._database.transaction() as connection:
            return tuple(
                connection.scalars(sa.select(TRIALS.c.number).where(running).order_by(TRIALS.c.number))
            )

    def version(self, study: str) -> str:
        """Returns a text that is another one after every commit to the study; others may change it, too.

        SQLite's files are looked at, which needs no query. PostgreSQL notes in each row which transaction wrote
        it (`xmin`): the newest of them and the number of rows tell of every commit.

        Raises:
            UserError: when the database cannot be read.
        """
        if self._file is not None:
            stats = [_stat(self._file.with_name(self._file.name + end)) for end in SQLITE_FILES]
            return repr(stats)
        newest = sa.func.max(sa.cast(sa.cast(sa.literal_column("xmin"), sa.Text), sa.BigInteger))
        with self._database.transaction() as connection:
            rows = [
                tuple(connection.execute(sa.select(newest, sa.func.count()).where(column == study)).one())
                for column in (STUDIES.c.name, TRIALS.c.study, RETRAININGS.c.study, COMPARISONS.c.study)
            ]
        return repr(rows)


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_mtime_ns, state.st_size
