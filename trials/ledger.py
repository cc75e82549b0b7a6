"""The ledger: every trial of every study, in SQLAlchemy tables. The one truth.

It commits first; the sampler and MLflow are told afterwards, and are brought up to date from it on resume.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, SQLAlchemyError

from dhen.errors import UserError
from trials.record import TrialRecord

SQLITE_TIMEOUT_SECONDS = 60

_METADATA = sa.MetaData()
_STUDIES = sa.Table(
    "dhen_study",
    _METADATA,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("facts", sa.JSON, nullable=False),
)
_TRIALS = sa.Table(
    "dhen_trial",
    _METADATA,
    sa.Column("study", sa.String(255), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("fingerprint", sa.String(64), index=True, nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
_TEST_LOOKS = sa.Table(
    "dhen_test_look",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("study", sa.String(255), index=True, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("at", sa.String(32), nullable=False),
)


class Ledger:
    """The trials of one study."""

    def __init__(self, url: str, study: str, *, create: bool = True) -> None:
        """Opens the tables, and creates them where missing unless told not to.

        Raises:
            UserError: when the database is locked, damaged, full or out of reach.
        """
        self.study = study
        self.url = url
        with self._errors_in_words():
            self._engine = sa.create_engine(url, **engine_options(url))
            if create:
                _METADATA.create_all(self._engine)

    def close(self) -> None:
        """Releases the database."""
        self._engine.dispose()

    def facts(self) -> dict[str, Any] | None:
        """What the study noted of itself (`note_facts`); None for a new study."""
        with self._connection() as connection:
            row = connection.execute(sa.select(_STUDIES.c.facts).where(_STUDIES.c.name == self.study)).first()
        return dict(row.facts) if row else None

    def note_facts(self, facts: dict[str, Any]) -> None:
        """Replaces the study's facts."""
        with self._connection() as connection:
            connection.execute(sa.delete(_STUDIES).where(_STUDIES.c.name == self.study))
            connection.execute(sa.insert(_STUDIES).values(name=self.study, facts=facts))

    def trials(self) -> list[TrialRecord]:
        """All trials in the order of their numbers."""
        query = sa.select(_TRIALS.c.record).where(_TRIALS.c.study == self.study).order_by(_TRIALS.c.number)
        with self._connection() as connection:
            rows = connection.execute(query).all()
        return [TrialRecord.model_validate_json(row.record) for row in rows]

    def save(self, record: TrialRecord) -> None:
        """Writes a trial, new or changed."""
        key = (_TRIALS.c.study == self.study) & (_TRIALS.c.number == record.number)
        with self._connection() as connection:
            connection.execute(sa.delete(_TRIALS).where(key))
            connection.execute(
                sa.insert(_TRIALS).values(
                    study=self.study,
                    number=record.number,
                    fingerprint=record.fingerprint,
                    outcome=record.outcome.value,
                    record=record.model_dump_json(),
                )
            )

    def count_test_look(self, number: int) -> None:
        """Notes that a trial is about to be scored on the test split."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._connection() as connection:
            connection.execute(sa.insert(_TEST_LOOKS).values(study=self.study, number=number, at=now))

    def test_looks(self) -> int:
        """How often the test split was looked at."""
        query = sa.select(sa.func.count()).select_from(_TEST_LOOKS).where(_TEST_LOOKS.c.study == self.study)
        with self._connection() as connection:
            return int(connection.execute(query).scalar_one())

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        """One transaction, committed at the end."""
        with self._errors_in_words(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, ModuleNotFoundError) as error:
            raise UserError(database_trouble(self.url, error)) from None


def engine_options(url: str) -> dict[str, Any]:
    """What SQLAlchemy needs to know of a database: SQLite waits for a lock, others check their connections."""
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": SQLITE_TIMEOUT_SECONDS}}
    return {"pool_pre_ping": True}


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.resolve()}"


def database_trouble(url: str, error: Exception) -> str:
    """What is wrong with a database, and what would work."""
    reason = str(getattr(error, "orig", None) or error).splitlines()[0]
    if "locked" in reason:
        remedy = "another process holds it: wait for that to end, or stop it"
    elif "full" in reason:
        remedy = "free some disk space and run the same command again: finished trials are safe"
    elif isinstance(error, DatabaseError) and not isinstance(error, OperationalError):
        remedy = "the file is damaged: restore it from a copy, or start a new study with another --out"
    elif isinstance(error, ModuleNotFoundError):
        remedy = "install the driver it names, e.g. `pip install psycopg2-binary` for PostgreSQL"
    elif isinstance(error, ArgumentError):
        remedy = "give a SQLAlchemy URL, e.g. sqlite:////path/study.db or postgresql://user@host/studies"
    else:
        remedy = "check the address, the permissions of the file and its folder, and that the server runs"
    return f"the study's database {_without_password(url)} cannot be used ({reason}); {remedy}."


def _without_password(url: str) -> str:
    try:
        return sa.engine.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return repr(url)
