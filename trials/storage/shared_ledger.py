"""A ledger that several studies share: what one study has trained, the others find there by the job's fingerprint.

It has the tables of a study's own (`trials.storage.schema`), filled from it: each trial that was trained,
once it has ended and the study's own ledger has it. A study that uses its own database as the shared one has
it there anyway.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from trials.record import Outcome, StudyTrial, TrialRecord
from trials.storage.database import Database, same_database
from trials.storage.ledger import Ledger, Setting, read_trials
from trials.storage.patience import patient
from trials.storage.schema import ATTEMPTS, STUDIES, TRIALS, WEIGHTS


class FileStamp(NamedTuple):
    """Size and time of a file, by which it is known again: another training in the same place has another
    stamp."""

    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, state: os.stat_result) -> FileStamp:
        """Returns the stamp of a file."""
        return cls(state.st_size, state.st_mtime_ns)


class SharedLedger:
    """What one study tells the other studies, and asks of them."""

    def __init__(self, url: str, ledger: Ledger, key: str, setting: Setting) -> None:
        """`ledger` is the study's own ledger, `key` its name in the shared one.

        Raises:
            UserError: when the database cannot be used.
        """
        self._same = same_database(url, ledger.url)
        self._ledger = ledger if self._same else Ledger(url, key)
        if not self._same:
            self._ledger.settle(setting)

    @property
    def database(self) -> Database:
        """The shared ledger's database."""
        return self._ledger.database

    def close(self) -> None:
        """Releases the database."""
        if not self._same:
            self._ledger.close()

    @patient
    def published(self) -> set[int]:
        """Returns the numbers of this study's trials that others can find."""
        return self._ledger.numbers()

    @patient
    def publish(self, record: TrialRecord, weights: Path) -> None:
        """Lets others find a trial that was trained and has ended; `weights` if it left some."""
        database = self._ledger.database
        with database.transaction() as connection:
            if not self._same:
                self._ledger.write(connection, record)
            if weights.exists():
                stamp = FileStamp.of(weights.stat())._asdict()
                key = {"study": self._ledger.study, "trial": record.number}
                database.upsert(connection, WEIGHTS, **key, **stamp)

    @patient
    def finished(self, fingerprint: str) -> list[tuple[TrialRecord, StudyTrial]]:
        """Returns the trials of other studies that have completed this job, and where each was trained."""
        tried = ATTEMPTS.alias()
        its = (tried.c.study == TRIALS.c.study) & (tried.c.trial == TRIALS.c.number)
        trained = sa.exists().where(its, tried.c.outcome == Outcome.COMPLETED.value).correlate(TRIALS)
        completed = TRIALS.c.outcome == Outcome.COMPLETED.value
        condition = (
            (TRIALS.c.job == fingerprint) & (TRIALS.c.study != self._ledger.study) & completed & trained
        )
        with self._ledger.database.reading() as connection:
            trials = read_trials(connection, condition)
            names = {study for study, _ in trials}
            studies = sa.select(STUDIES.c.name, STUDIES.c.directory).where(STUDIES.c.name.in_(names))
            directories = {row.name: row.directory for row in connection.execute(studies)}
        return [
            (record, StudyTrial(study=study, directory=directories[study], trial=number))
            for (study, number), record in trials.items()
        ]

    @patient
    def weights_stamp(self, origin: StudyTrial) -> FileStamp | None:
        """Returns the stamp of the weights that a training left."""
        its = (WEIGHTS.c.study == origin.study) & (WEIGHTS.c.trial == origin.trial)
        with self._ledger.database.transaction() as connection:
            row = connection.execute(
                sa.select(WEIGHTS.c.size_bytes, WEIGHTS.c.modified_ns).where(its)
            ).first()
        return FileStamp(*row) if row else None
