"""The ledger: every trial of every study, in SQLAlchemy tables (`trials.storage.schema`). The one truth.

It commits first; the sampler and MLflow are told afterwards, and are brought up to date from it on resume.
A trial is written in one transaction: its job, its plan, its attempts, and what is left of its record.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json

from dhen.fingerprint import fingerprint
from dhen.values import Value
from trials.record import Attempt, JobSummary, Outcome, PlanSummary, TrialRecord
from trials.storage.analyses import Analyses
from trials.storage.columns import (
    BRIEF,
    WHOLE,
    Columns,
    job_columns,
    plan_columns,
    read_job,
    read_plans,
    read_record,
    trial_columns,
)
from trials.storage.database import Database
from trials.storage.garbage import no_garbage_collection
from trials.storage.schema import (
    ATTEMPTS,
    CLUSTERS,
    COMPARISONS,
    JOBS,
    LOGS,
    METADATA,
    PLANS,
    RETRAININGS,
    STUDIES,
    TEST_LOOKS,
    TRIALS,
)
from trials.study_record import Comparison


class Setting(Value):
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


class Ledger:
    """The trials of one study."""

    def __init__(self, url: str, study: str, *, create: bool = True) -> None:
        """Opens the tables, and makes them where missing unless told not to.

        Raises:
            UserError: when the database is locked, damaged, full, out of reach, or holds other tables.
        """
        self.study = study
        self.url = url
        self.database = Database(url, METADATA, create=create)
        self.analyses = Analyses(self.database, study)
        """Ablations and slices of the study's winners."""
        self._setting: Setting | None = None
        self._cluster = ""
        self._written: set[str] = set()
        """Keys of jobs and plans that are known to be there."""

    def close(self) -> None:
        """Releases the database."""
        self.database.close()

    def settle(self, setting: Setting) -> None:
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

    def facts(self) -> dict[str, Any] | None:
        """Returns what the study noted of itself (`note_facts`); None for a new study."""
        with self.database.transaction() as connection:
            row = connection.execute(sa.select(STUDIES.c.facts).where(STUDIES.c.name == self.study)).first()
        return dict(row.facts) if row and row.facts else None

    def note_facts(self, facts: dict[str, Any]) -> None:
        """Replaces the study's facts."""
        with self.database.transaction() as connection:
            self.database.upsert(connection, STUDIES, name=self.study, facts=facts)

    def trials(self, *, brief: bool = False) -> list[TrialRecord]:
        """Returns all trials in the order of their numbers; `brief`: without what only a close look needs
        (`trials.storage.columns`)."""
        with self.database.transaction() as connection:
            columns = BRIEF if brief else WHOLE
            return list(read_trials(connection, TRIALS.c.study == self.study, columns).values())

    def running(self) -> list[TrialRecord]:
        """Returns the trials that were last written as running, in the order of their numbers."""
        running = (TRIALS.c.study == self.study) & (TRIALS.c.outcome == Outcome.RUNNING.value)
        with self.database.transaction() as connection:
            return list(read_trials(connection, running).values())

    def numbers(self) -> set[int]:
        """Returns the numbers of all trials."""
        with self.database.transaction() as connection:
            return set(connection.scalars(sa.select(TRIALS.c.number).where(TRIALS.c.study == self.study)))

    def save(self, record: TrialRecord) -> None:
        """Writes a trial, new or changed."""
        with self.database.transaction() as connection:
            written = self.write(connection, record)
        # only once committed: what a failed transaction wrote is not there
        self._written |= written

    def write(self, connection: sa.Connection, record: TrialRecord) -> set[str]:
        """Writes a trial within a transaction of the caller's; returns the ids of the job and the plan that are
        now there."""
        if record.job.fingerprint:
            self._write_job(connection, record.job)
        plan = self._write_plan(connection, record, record.plan.summary)
        attempt_plans = [self._write_plan(connection, record, attempt.plan) for attempt in record.attempts]
        self.database.upsert(
            connection,
            TRIALS,
            study=self.study,
            number=record.number,
            job=record.job.fingerprint or None,
            plan=plan,
            kind=record.kind.value,
            outcome=record.result.outcome.value,
            **trial_columns(record),
        )
        of_trial = (ATTEMPTS.c.study == self.study) & (ATTEMPTS.c.trial == record.number)
        connection.execute(sa.delete(ATTEMPTS).where(of_trial))
        key = {"study": self.study, "trial": record.number}
        rows = [
            key | {"position": position} | attempt.to_dict() | {"plan": attempt_plan}
            for position, (attempt, attempt_plan) in enumerate(
                zip(record.attempts, attempt_plans, strict=True)
            )
        ]
        if rows:
            connection.execute(sa.insert(ATTEMPTS), rows)
        return {name for name in (record.job.fingerprint, plan, *attempt_plans) if name}

    def save_retraining(self, record: TrialRecord) -> None:
        """Writes a retraining, new or changed."""
        with self.database.transaction() as connection:
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

    def retrainings(self) -> list[TrialRecord]:
        """Returns all retrainings of the study, in the order of their numbers."""
        query = sa.select(RETRAININGS.c.record, JOBS.c.summary, JOBS.c.cost)
        query = query.join(JOBS, RETRAININGS.c.job == JOBS.c.fingerprint)
        query = query.where(RETRAININGS.c.study == self.study).order_by(RETRAININGS.c.number)
        with self.database.transaction() as connection:
            rows = connection.execute(query).all()
        return [
            TrialRecord.model_validate(from_json(record) | {"job": read_job(summary, cost)})
            for record, summary, cost in rows
        ]

    def replace_comparisons(self, comparisons: Iterable[Comparison]) -> None:
        """Writes comparisons of winners with the baseline, in place of earlier ones."""
        with self.database.transaction() as connection:
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

    def comparisons(self) -> tuple[Comparison, ...]:
        """Returns the comparisons of winners with the baseline, by FLOPs."""
        query = sa.select(COMPARISONS.c.comparison).where(COMPARISONS.c.study == self.study)
        with self.database.transaction() as connection:
            texts = connection.scalars(query.order_by(COMPARISONS.c.position))
            return tuple(Comparison.model_validate_json(text) for text in texts)

    def count_test_look(self, number: int) -> None:
        """Notes that a trial is about to be scored on the test split."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self.database.transaction() as connection:
            connection.execute(sa.insert(TEST_LOOKS).values(study=self.study, number=number, at=now))

    def test_looks(self) -> int:
        """Returns how often the test split was looked at."""
        query = sa.select(sa.func.count()).select_from(TEST_LOOKS).where(TEST_LOOKS.c.study == self.study)
        with self.database.transaction() as connection:
            return int(connection.execute(query).scalar_one())

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
            **job_columns(job),
        )

    def _write_plan(
        self, connection: sa.Connection, record: TrialRecord, plan: PlanSummary | None
    ) -> str | None:
        """Returns the id of the plan's row: equal plans of a job are one row. None where nothing was planned."""
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
            **plan_columns(plan),
        )
        return identity


def read_trials(
    connection: sa.Connection, condition: sa.ColumnElement[bool], columns: Columns = WHOLE
) -> dict[tuple[str, int], TrialRecord]:
    """Returns trials put together again, by study and number, in that order."""
    trials = sa.select(TRIALS.c.study, TRIALS.c.number, TRIALS.c.job, TRIALS.c.plan, *columns).where(
        condition
    )
    trials = trials.outerjoin(JOBS, TRIALS.c.job == JOBS.c.fingerprint)
    trials = trials.outerjoin(PLANS, TRIALS.c.plan == PLANS.c.id)
    with no_garbage_collection():
        rows = connection.execute(trials.order_by(TRIALS.c.study, TRIALS.c.number)).all()
        texts = {plan: (text, details) for _, _, _, plan, *_, text, details in rows if plan is not None}
        plans = read_plans(texts | _replaced_plans(connection, condition, columns[-2:]))
        tried = _attempts(connection, condition, plans)
        return {
            (study, number): read_record(
                *(record, point, curve),
                attempts=tuple(tried.get((study, number), ())),
                job=None if job is None else read_job(summary, cost),
                plan=plans.get(plan),
            )
            for study, number, job, plan, record, point, curve, summary, cost, *_ in rows
        }


_ITS_ATTEMPTS = (TRIALS.c.study == ATTEMPTS.c.study) & (TRIALS.c.number == ATTEMPTS.c.trial)


def _replaced_plans(
    connection: sa.Connection, condition: sa.ColumnElement[bool], columns: Columns
) -> dict[str, tuple[str, str | None]]:
    """Returns the columns of plans of attempts that another attempt's plan has replaced, by id."""
    plans = sa.select(PLANS.c.id, *columns).join(ATTEMPTS, ATTEMPTS.c.plan == PLANS.c.id)
    plans = plans.join(TRIALS, _ITS_ATTEMPTS).where(condition, ATTEMPTS.c.plan != TRIALS.c.plan)
    return {plan: (text, details) for plan, text, details in connection.execute(plans)}


def _attempts(
    connection: sa.Connection, condition: sa.ColumnElement[bool], plans: Mapping[str, PlanSummary]
) -> dict[tuple[str, int], list[Attempt]]:
    """Returns the attempts of trials in order, by study and number of the trial."""
    names = tuple(name for name in Attempt.model_fields if name != "plan")
    columns = (ATTEMPTS.c.study, ATTEMPTS.c.trial, ATTEMPTS.c.plan, *(ATTEMPTS.c[name] for name in names))
    query = sa.select(*columns).join(TRIALS, _ITS_ATTEMPTS).where(condition).order_by(ATTEMPTS.c.position)
    tried: dict[tuple[str, int], list[Attempt]] = {}
    for study, number, plan, *values in connection.execute(query).all():
        attempt = Attempt(**dict(zip(names, values, strict=True)), plan=plans.get(plan))
        tried.setdefault((study, number), []).append(attempt)
    return tried
