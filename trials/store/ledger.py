"""The ledger: every trial of every study, in SQLAlchemy tables (`trials.store.schema`). The one truth.

It commits first; the sampler and MLflow are told afterwards, and are brought up to date from it on resume.
A trial is written in one transaction: its job, its plan, its attempts, and what is left of its record.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from pydantic_core import from_json, to_json

from dhen.values import Value, fingerprint
from trials.records.findings import Ablation, Slices
from trials.records.study_record import Comparison
from trials.records.trial_record import Attempt, JobSummary, Outcome, PlanSummary, TrialRecord
from trials.store.database import Database, patient, sqlite_file
from trials.store.garbage import no_garbage_collection
from trials.store.leases import Driver, Leases
from trials.store.schema import (
    ANALYSES,
    ATTEMPTS,
    BRIEF,
    CLUSTERS,
    COMPARISONS,
    DETAILS,
    IN_TABLES,
    JOBS,
    LOGS,
    METADATA,
    PLANS,
    RETRAININGS,
    STUDIES,
    TEST_LOOKS,
    TRIALS,
    WHOLE,
    Columns,
    read_job,
)

ABLATION, SLICES = "ablation", "slices"
"""Kinds of analyses of a study's winners: the last ablation of each trial, the last slices of each column."""


class StudySetting(Value):
    """What all trials of a study have in common."""

    directory: str
    """Run directory of the study."""
    log: str
    """Fingerprint of the prepared log."""
    features: dict[str, Any]
    """Inputs that models see of the log."""
    seed: int
    version: int
    """Version of training, a part of every job."""
    cluster: dict[str, Any]
    """Cluster that trials are planned for."""


class Changes(NamedTuple):
    """What a study's drivers have committed since an earlier look."""

    revision: int
    """The study's revision as of now, for the next look."""
    trials: tuple[TrialRecord, ...]
    """Trials that other drivers have written, as they are now."""
    facts: dict[str, Any]
    """What the study notes of itself, as of now."""


class Ledger:
    """The trials of one study."""

    def __init__(self, url: str, study: str, *, create: bool = True) -> None:
        """Opens the tables, and makes them if missing unless told not to.

        Raises:
            UserError: when the database is locked, damaged, full, out of reach, or holds other tables.
        """
        self.study = study
        self.url = url
        self.database = Database(url, METADATA, create=create)
        self._setting: StudySetting | None = None
        self._cluster = ""
        self._written: set[str] = set()
        """Keys of jobs and plans that are known to be there."""
        self.leases: Leases | None = None
        """Leases of the driver that writes here, if others may share the study; None: it is the only one."""
        self._own_revisions: set[int] = set()

    def close(self) -> None:
        """Releases the database."""
        self.database.close()

    @patient
    def settle(self, setting: StudySetting) -> None:
        """Notes what trials have in common; called before the first trial is saved."""
        cluster, self._cluster = setting.cluster, fingerprint(setting.cluster)
        values = {"directory": setting.directory, "log": setting.log, "seed": setting.seed}
        with self.database.transaction() as connection:
            new = self.database.insert_new
            new(connection, LOGS, fingerprint=setting.log, features=json.dumps(setting.features))
            new(
                connection,
                CLUSTERS,
                id=self._cluster,
                name=cluster["name"],
                hosts=cluster["hosts"],
                ranks=cluster["hosts"] * cluster["gpus_per_host"],
                rank_memory_bytes=cluster["hbm"],
                cluster=json.dumps(cluster),
            )
            new(connection, STUDIES, name=self.study, facts={})
            this_study = STUDIES.c.name == self.study
            connection.execute(sa.update(STUDIES).where(this_study).values(**values, cluster=self._cluster))
        self._setting = setting

    @patient
    def facts(self) -> dict[str, Any] | None:
        """Returns what the study noted of itself (`change_facts`); None for a new study."""
        with self.database.reading() as connection:
            row = connection.execute(sa.select(STUDIES.c.facts).where(STUDIES.c.name == self.study)).first()
            return dict(row.facts) if row and row.facts else None

    @patient
    def directory(self) -> str | None:
        """Returns the run directory that the study was begun in; None for a new study."""
        query = sa.select(STUDIES.c.directory).where(STUDIES.c.name == self.study)
        with self.database.transaction() as connection:
            directory: str | None = connection.scalar(query)
        return directory

    @patient
    def change_facts(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replaces the study's facts by what `change` makes of them as they are now, whoever has noted them."""
        facts = sa.select(STUDIES.c.facts).where(STUDIES.c.name == self.study).with_for_update()
        with self._writing() as connection:
            row = connection.execute(facts).first()
            changed = change(dict(row.facts) if row and row.facts else {})
            self.database.upsert(connection, STUDIES, name=self.study, facts=changed)

    @patient
    def revision(self) -> int:
        """Returns the number of commits of the study's drivers; 0 if it has one driver."""
        query = sa.select(STUDIES.c.revision).where(STUDIES.c.name == self.study)
        with self.database.transaction() as connection:
            return int(connection.scalar(query) or 0)

    @patient
    def changes(self, since: int) -> Changes | None:
        """Returns what the study's drivers have committed since a revision; None if nothing was."""
        its = sa.select(STUDIES.c.revision, STUDIES.c.facts).where(STUDIES.c.name == self.study)
        newer = (TRIALS.c.study == self.study) & (TRIALS.c.revision > since)
        with self.database.reading() as connection:
            query = sa.select(STUDIES.c.revision).where(STUDIES.c.name == self.study)
            if (connection.scalar(query) or 0) <= since:
                return None
            row = connection.execute(its).one()
            rows = connection.execute(sa.select(TRIALS.c.number, TRIALS.c.revision).where(newer)).all()
            numbers = [number for number, revision in rows if revision not in self._own_revisions]
            others = (TRIALS.c.study == self.study) & TRIALS.c.number.in_(numbers)
            trials = tuple(read_trials(connection, others).values()) if numbers else ()
        self._own_revisions = {revision for revision in self._own_revisions if revision > row.revision}
        return Changes(row.revision, trials, dict(row.facts or {}))

    @patient
    def bury(self, dead: Driver, lost: Callable[[TrialRecord], TrialRecord]) -> tuple[TrialRecord, ...]:
        """Removes a driver that is dead; the trials that it ran become what `lost` makes of them, and are free.

        Returns these trials; none if the driver lives after all, or another one was first.
        """
        assert self.leases is not None, "the study has one driver"
        with self.database.transaction() as connection:
            self.leases.check(connection)
            numbers = self.leases.bury(connection, dead)
            if numbers is None:
                return ()
            revision = self._next_revision(connection)
            its = (TRIALS.c.study == self.study) & TRIALS.c.number.in_(numbers)
            trials = tuple(map(lost, read_trials(connection, its).values())) if numbers else ()
            for trial in trials:
                self._write(connection, trial, revision)
        return trials

    @patient
    def trials(self, *, brief: bool = False) -> list[TrialRecord]:
        """Returns all trials in the order of their numbers; `brief`: without what only a close look needs
        (`trials.store.schema`)."""
        with self.database.reading() as connection:
            columns = BRIEF if brief else WHOLE
            return list(read_trials(connection, TRIALS.c.study == self.study, columns).values())

    @patient
    def running(self) -> list[TrialRecord]:
        """Returns the trials that were last written as running, in the order of their numbers."""
        running = (TRIALS.c.study == self.study) & (TRIALS.c.outcome == Outcome.RUNNING.value)
        with self.database.reading() as connection:
            return list(read_trials(connection, running).values())

    @patient
    def save(self, record: TrialRecord) -> None:
        """Writes a trial, new or changed."""
        with self.database.transaction() as connection:
            revision = 0
            if self.leases is not None:
                running = record.result.outcome is Outcome.RUNNING
                self.leases.hold(connection, record.number, running=running)
                revision = self._next_revision(connection)
                self._own_revisions.add(revision)
            written = self._write(connection, record, revision)
        # only once committed: what a failed transaction wrote is not there
        self._written |= written

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """Opens a transaction of a driver that may write, which others will see as a change of the study."""
        with self.database.transaction() as connection:
            if self.leases is not None:
                self.leases.check(connection)
                self._next_revision(connection)
            yield connection

    def _next_revision(self, connection: sa.Connection) -> int:
        """Returns the revision that the transaction makes: others wait for its end, so revisions are in the order
        of commits, and who has seen one has missed none before it."""
        its = sa.update(STUDIES).where(STUDIES.c.name == self.study)
        query = its.values(revision=STUDIES.c.revision + 1).returning(STUDIES.c.revision)
        return int(connection.scalar(query) or 0)

    def _write(self, connection: sa.Connection, record: TrialRecord, revision: int = 0) -> set[str]:
        """Writes a trial within a transaction of the caller's; returns the ids of the job and the plan that are
        now there."""
        if record.job.fingerprint:
            self._write_job(connection, record.job)
        plan = self._write_plan(connection, record, record.plan.summary)
        attempt_plans = [self._write_plan(connection, record, attempt.plan) for attempt in record.attempts]
        *earlier, last = record.result.curve or (None,)
        in_short = record.with_result(curve=(last,)) if earlier else record
        self.database.upsert(
            connection,
            TRIALS,
            study=self.study,
            number=record.number,
            job=record.job.fingerprint or None,
            plan=plan,
            kind=record.kind.value,
            outcome=record.result.outcome.value,
            revision=revision,
            record=in_short.model_dump_json(exclude=IN_TABLES | {"point": True}),
            point=to_json(record.point).decode(),
            curve=to_json(earlier).decode(),
        )
        of_trial = (ATTEMPTS.c.study == self.study) & (ATTEMPTS.c.trial == record.number)
        connection.execute(sa.delete(ATTEMPTS).where(of_trial))
        key = {"study": self.study, "trial": record.number}
        rows = [
            key | {"position": position} | attempt.to_dict() | {"plan": attempt_plans[position]}
            for position, attempt in enumerate(record.attempts)
        ]
        if rows:
            connection.execute(sa.insert(ATTEMPTS), rows)
        return {name for name in (record.job.fingerprint, plan, *attempt_plans) if name}

    @patient
    def save_retraining(self, record: TrialRecord) -> None:
        """Writes a retraining, new or changed."""
        with self._writing() as connection:
            self._write_job(connection, record.job)
            self.database.upsert(
                connection,
                RETRAININGS,
                study=self.study,
                number=record.number,
                of=record.origin.of,
                removed=record.origin.removed,
                job=record.job.fingerprint,
                outcome=record.result.outcome.value,
                record=record.model_dump_json(exclude={"job"}),
            )
        self._written.add(record.job.fingerprint)

    @patient
    def retrainings(self) -> list[TrialRecord]:
        """Returns all retrainings of the study, in the order of their numbers."""
        query = sa.select(RETRAININGS.c.record, JOBS.c.summary, JOBS.c.cost)
        query = query.join(JOBS, RETRAININGS.c.job == JOBS.c.fingerprint)
        query = query.where(RETRAININGS.c.study == self.study).order_by(RETRAININGS.c.number)
        with self.database.reading() as connection:
            return [
                TrialRecord.model_validate(from_json(record) | {"job": read_job(summary, cost)})
                for record, summary, cost in connection.execute(query)
            ]

    @patient
    def replace_comparisons(self, comparisons: Iterable[Comparison]) -> None:
        """Writes comparisons of winners with the baseline, in place of earlier ones."""
        with self._writing() as connection:
            connection.execute(sa.delete(COMPARISONS).where(COMPARISONS.c.study == self.study))
            rows = [
                {
                    "study": self.study,
                    "trial": comparison.trial,
                    "position": position,
                    "difference_percent": comparison.difference_percent,
                    "better": comparison.better.value,
                    "comparison": comparison.model_dump_json(),
                }
                for position, comparison in enumerate(comparisons)
            ]
            if rows:
                connection.execute(sa.insert(COMPARISONS), rows)

    @patient
    def comparisons(self) -> tuple[Comparison, ...]:
        """Returns the comparisons of winners with the baseline, by FLOPs."""
        query = sa.select(COMPARISONS.c.comparison).where(COMPARISONS.c.study == self.study)
        with self.database.reading() as connection:
            texts = connection.scalars(query.order_by(COMPARISONS.c.position))
            return tuple(Comparison.model_validate_json(text) for text in texts)

    @patient
    def count_test_look(self, number: int) -> None:
        """Notes that a trial is about to be scored on the test split."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._writing() as connection:
            connection.execute(sa.insert(TEST_LOOKS).values(study=self.study, number=number, at=now))

    @patient
    def test_looks(self) -> int:
        """Returns how often the test split was looked at."""
        query = sa.select(sa.func.count()).select_from(TEST_LOOKS).where(TEST_LOOKS.c.study == self.study)
        with self.database.transaction() as connection:
            return int(connection.execute(query).scalar_one())

    def keep_analysis(self, analysis: Ablation | Slices) -> None:
        """Writes an analysis, in place of an earlier one of the same trial and the same column."""
        kind, column = (SLICES, analysis.column) if isinstance(analysis, Slices) else (ABLATION, "")
        key = {"study": self.study, "kind": kind, "trial": analysis.trial, "column": column}
        with self.database.transaction() as connection:
            self.database.upsert(connection, ANALYSES, **key, analysis=analysis.model_dump_json())

    def ablations(self) -> tuple[Ablation, ...]:
        """Returns the ablations of the study's winners, by number of the trial."""
        with self.database.record_errors():
            return tuple(Ablation.model_validate_json(text) for text in self._analyses(ABLATION))

    def slices(self) -> tuple[Slices, ...]:
        """Returns the slices of the study's winners, by number of the trial and column."""
        with self.database.record_errors():
            return tuple(Slices.model_validate_json(text) for text in self._analyses(SLICES))

    def _analyses(self, kind: str) -> list[str]:
        query = sa.select(ANALYSES.c.analysis).where(ANALYSES.c.study == self.study, ANALYSES.c.kind == kind)
        with self.database.transaction() as connection:
            return list(connection.scalars(query.order_by(ANALYSES.c.trial, ANALYSES.c.column)))

    def _write_job(self, connection: sa.Connection, job: JobSummary) -> None:
        if job.fingerprint in self._written:
            return
        assert self._setting is not None, "settle before save"
        self.database.insert_new(
            connection,
            JOBS,
            fingerprint=job.fingerprint,
            log=self._setting.log,
            seed=job.seed,
            version=self._setting.version,
            summary=job.model_dump_json(exclude={"cost"}),
            cost=to_json(job.cost).decode(),
        )

    def _write_plan(
        self, connection: sa.Connection, record: TrialRecord, plan: PlanSummary | None
    ) -> str | None:
        """Returns the id of the plan's row: equal plans of a job are one row. None if nothing was planned."""
        if plan is None:
            return None
        identity = fingerprint([record.job.fingerprint, self._cluster, plan.model_dump_json()])
        if identity in self._written:
            return identity
        self.database.insert_new(
            connection,
            PLANS,
            id=identity,
            job=record.job.fingerprint,
            cluster=self._cluster,
            strategy=plan.strategy,
            fits=plan.fits,
            predicted_peak_bytes=plan.peak_bytes,
            predicted_step_seconds=plan.whole_step_seconds,
            plan=plan.model_dump_json(exclude=DETAILS),
            details=plan.model_dump_json(include=DETAILS),
        )
        return identity


def read_trials(
    connection: sa.Connection, condition: sa.ColumnElement[bool], columns: Columns = WHOLE
) -> dict[tuple[str, int], TrialRecord]:
    """Returns trials put together again, by study and number, in that order."""
    key = (TRIALS.c.study, TRIALS.c.number)
    trials = sa.select(*key, TRIALS.c.job, TRIALS.c.plan, *columns).where(condition)
    trials = trials.outerjoin(JOBS, TRIALS.c.job == JOBS.c.fingerprint)
    trials = trials.outerjoin(PLANS, TRIALS.c.plan == PLANS.c.id)
    its_attempts = (TRIALS.c.study == ATTEMPTS.c.study) & (TRIALS.c.number == ATTEMPTS.c.trial)
    # plans of attempts that another attempt's plan has replaced
    replaced = sa.select(PLANS.c.id, *columns[-2:]).join(ATTEMPTS, ATTEMPTS.c.plan == PLANS.c.id)
    replaced = replaced.join(TRIALS, its_attempts).where(condition, ATTEMPTS.c.plan != TRIALS.c.plan)
    names = tuple(name for name in Attempt.model_fields if name != "plan")
    attempts = sa.select(*key, ATTEMPTS.c.plan, *(ATTEMPTS.c[name] for name in names))
    attempts = attempts.join(TRIALS, its_attempts).where(condition).order_by(ATTEMPTS.c.position)
    with no_garbage_collection():
        rows = connection.execute(trials.order_by(*key)).all()
        texts = {plan: (text, details) for _, _, _, plan, *_, text, details in rows if plan is not None}
        texts |= {plan: (text, details) for plan, text, details in connection.execute(replaced)}
        parsed = {  # equal plans once
            each: PlanSummary.model_validate(from_json(each[0]) | (from_json(each[1]) if each[1] else {}))
            for each in set(texts.values())
        }
        plans = {plan: parsed[each] for plan, each in texts.items()}
        tried: dict[tuple[str, int], list[Attempt]] = {}
        for study, number, plan, *values in connection.execute(attempts).all():
            attempt = Attempt(**dict(zip(names, values, strict=True)), plan=plans.get(plan))
            tried.setdefault((study, number), []).append(attempt)
        found: dict[tuple[str, int], TrialRecord] = {}
        for study, number, job, plan, record, point, curve, summary, cost, *_ in rows:
            data = from_json(record) | {"attempts": tuple(tried.get((study, number), ()))}
            if point is not None:
                data["point"] = from_json(point)
            if curve is not None:
                data["result"]["curve"] = from_json(curve) + data["result"]["curve"]
            if job is not None:
                data["job"] = read_job(summary, cost)
            if plan is not None:
                data["plan"]["summary"] = plans[plan]
            found[study, number] = TrialRecord.model_validate(data)
    return found


# Which studies a database holds, and a cheap answer to whether one of them has changed.

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
            numbers = sa.select(TRIALS.c.number).where(running).order_by(TRIALS.c.number)
            return tuple(connection.scalars(numbers))

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
