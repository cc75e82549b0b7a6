"""The ledger's SQLAlchemy tables: what was trained, for which cluster, how it was planned and how it went.

Normalised, to be queried with SQL. A trial's `record` is its `TrialRecord` as JSON, less what has tables of
its own (its job, the summary of its plan, its attempts) or columns of its own: its point, and its curve but
the last evaluation. Other columns of the row (`kind`, `outcome`) are there to select
by.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pydantic_core import from_json

from trials.records.trial_record import TrialKind

METADATA = sa.MetaData()
_STUDY = sa.String(255)
_FINGERPRINT = sa.String(64)

LOGS = sa.Table(
    "dhen_log",
    METADATA,
    sa.Column("fingerprint", _FINGERPRINT, primary_key=True),
    sa.Column("features", sa.Text, nullable=False),
)
"""Prepared logs and the features that models see of them (JSON)."""

CLUSTERS = sa.Table(
    "dhen_cluster",
    METADATA,
    sa.Column("id", _FINGERPRINT, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("hosts", sa.Integer, nullable=False),
    sa.Column("ranks", sa.Integer, nullable=False),
    sa.Column("rank_memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("cluster", sa.Text, nullable=False),
)
"""Clusters that candidates are planned for; `ranks` are those of all hosts; `cluster` is the whole description
(JSON)."""

STUDIES = sa.Table(
    "dhen_study",
    METADATA,
    sa.Column("name", _STUDY, primary_key=True),
    sa.Column("directory", sa.Text),
    sa.Column("log", sa.ForeignKey("dhen_log.fingerprint")),
    sa.Column("cluster", sa.ForeignKey("dhen_cluster.id")),
    sa.Column("seed", sa.BigInteger),
    sa.Column("facts", sa.JSON, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"),
)
"""Studies; `facts` is what a study noted of itself (JSON); `revision` counts commits of drivers that share it."""

JOBS = sa.Table(
    "dhen_job",
    METADATA,
    sa.Column("fingerprint", _FINGERPRINT, primary_key=True),
    sa.Column("log", sa.ForeignKey("dhen_log.fingerprint"), nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("summary", sa.Text, nullable=False),
    sa.Column("cost", sa.Text, nullable=False),
)
"""Jobs; `summary` is a `JobSummary` less its `cost`, the cost table (both JSON). With its log's features a summary
is the whole `Job`."""

PLANS = sa.Table(
    "dhen_plan",
    METADATA,
    sa.Column("id", _FINGERPRINT, primary_key=True),
    sa.Column("job", sa.ForeignKey("dhen_job.fingerprint"), nullable=False, index=True),
    sa.Column("cluster", sa.ForeignKey("dhen_cluster.id"), nullable=False),
    sa.Column("strategy", sa.String(128)),
    sa.Column("fits", sa.Boolean, nullable=False),
    sa.Column("predicted_peak_bytes", sa.BigInteger),
    sa.Column("predicted_step_seconds", sa.Float),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("details", sa.Text, nullable=False),
)
"""Plans of a job on a cluster: the strategy chosen and what it is to take; `details` are the bytes and the seconds
of each item and the reasons, `plan` is the rest of a `PlanSummary` (both JSON). A job may have several: what ran
out of memory makes later plans leave more room."""

TRIALS = sa.Table(
    "dhen_trial",
    METADATA,
    sa.Column("study", sa.ForeignKey("dhen_study.name"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("job", sa.ForeignKey("dhen_job.fingerprint"), index=True),
    sa.Column("plan", sa.ForeignKey("dhen_plan.id")),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Column("point", sa.Text, nullable=False),
    sa.Column("curve", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_dhen_trial_revision", "study", "revision"),
)
"""Trials; one has no job if the point gives no model. `curve` has the evaluations before the last one, which
stays in `record` (JSON, as `point` is). `revision` is the study's when the trial was last written, by which its
other drivers find what has changed."""

ATTEMPTS = sa.Table(
    "dhen_attempt",
    METADATA,
    sa.Column("study", _STUDY, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("strategy", sa.String(128), nullable=False),
    sa.Column("executed", sa.String(128)),
    sa.Column("plan", sa.ForeignKey("dhen_plan.id")),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("predicted_bytes", sa.BigInteger),
    sa.Column("measured_bytes", sa.BigInteger),
    sa.Column("predicted_step_seconds", sa.Float),
    sa.Column("measured_step_seconds", sa.Float),
    sa.Column("needed_bytes", sa.BigInteger),
    sa.Column("limit_bytes", sa.BigInteger),
    sa.Column("seconds", sa.Float),
    sa.Column("evaluations", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Column("replaced", sa.Text),
    sa.Column("slow_rank", sa.Text),
    sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
)
"""The trainings of a trial, `position` 0, 1, 2 ...; columns from `strategy` on are those of `Attempt`,
whose plan is a row of its own."""

RETRAININGS = sa.Table(
    "dhen_retraining",
    METADATA,
    sa.Column("study", sa.ForeignKey("dhen_study.name"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("of", sa.Integer, nullable=False),
    sa.Column("removed", sa.String(255)),
    sa.Column("job", sa.ForeignKey("dhen_job.fingerprint"), nullable=False, index=True),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["study", "of"], ["dhen_trial.study", "dhen_trial.number"]),
)
"""Networks of trials trained again after selection, whole or with something `removed`; seeds are the jobs'."""

COMPARISONS = sa.Table(
    "dhen_comparison",
    METADATA,
    sa.Column("study", _STUDY, primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("difference_percent", sa.Float, nullable=False),
    sa.Column("better", sa.String(32), nullable=False),
    sa.Column("comparison", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
)
"""Winners against the baseline, in order; `comparison` is the whole of it (JSON)."""

ANALYSES = sa.Table(
    "dhen_analysis",
    METADATA,
    sa.Column("study", _STUDY, primary_key=True),
    sa.Column("kind", sa.String(32), primary_key=True),
    sa.Column("trial", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("column", sa.String(255), primary_key=True),
    sa.Column("analysis", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
)
"""What was worked out of winners: an `ablation` of each (its `column` is empty), their `slices` by column;
`analysis` is the whole of it (JSON)."""

TEST_LOOKS = sa.Table(
    "dhen_test_look",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("study", _STUDY, index=True, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("at", sa.String(32), nullable=False),
)

DRIVERS = sa.Table(
    "dhen_driver",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("study", _STUDY, index=True, nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("directory", sa.Text, nullable=False),
    sa.Column("beats", sa.BigInteger, nullable=False),
)
"""Drivers that share a study: the machine and the process of each, the run directory that it works in, and a
number that grows while it lives (`trials.store.leases`)."""

LEASES = sa.Table(
    "dhen_lease",
    METADATA,
    sa.Column("study", _STUDY, primary_key=True),
    sa.Column("what", sa.String(32), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("driver", sa.ForeignKey("dhen_driver.id", ondelete="CASCADE"), index=True, nullable=False),
)
"""What one driver of a study alone may do: run the `trial` of a `number`, propose the next one (`turn`), do what
is no work for two (`lead`), write the report and MLflow's runs (`report`); they go with their driver."""


# A trial in columns: what a summary shows of it stands apart from what only a close look needs, so that who
# looks at thousands of trials at once reads less. What is not read is neither sent nor parsed, and no database
# has to cut JSON.
#
# In brief, every trial comes without its point and its job's cost table, and a candidate without its curve, of
# which the last evaluation stays. A plan that fits comes without its items and its reasons; then most plans of a
# study are equal, and equal ones are parsed once.

Columns = tuple[sa.ColumnElement[Any], ...]
"""Columns of a trial, its job and its plan, in the order of `WHOLE`."""
WHOLE: Columns = (
    *(TRIALS.c.record, TRIALS.c.point, TRIALS.c.curve),
    *(JOBS.c.summary, JOBS.c.cost),
    *(PLANS.c.plan, PLANS.c.details),
)
BRIEF: Columns = (
    *(TRIALS.c.record, sa.null(), sa.case((TRIALS.c.kind != TrialKind.CANDIDATE.value, TRIALS.c.curve))),
    *(JOBS.c.summary, sa.null()),
    *(PLANS.c.plan, sa.case((sa.not_(PLANS.c.fits), PLANS.c.details))),
)
IN_TABLES: Any = {"job": True, "attempts": True, "plan": {"summary"}}
"""Parts of a record that have tables of their own."""
DETAILS = {"memory_bytes", "step_seconds", "peak_at", "reason", "rejected", "other_shapes", "faster", "notes"}
"""Keys of a plan that stand in its column `details`."""


def read_job(summary: str, cost: str | None) -> dict[str, Any]:
    """Returns the data of a `JobSummary`."""
    data: dict[str, Any] = from_json(summary)
    return data if cost is None else data | {"cost": from_json(cost)}
