"""The tables of the first release.

A migration is as the tables were when it was written: what `trials.store.schema` says later is none of its
business, so it names them itself.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0005", None


def upgrade() -> None:
    """Makes all tables."""
    tables = sa.MetaData()
    sa.Table(
        "dhen_cluster",
        tables,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("hosts", sa.Integer(), nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("rank_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
    )
    sa.Table(
        "dhen_log",
        tables,
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("features", sa.Text(), nullable=False),
    )
    sa.Table(
        "dhen_test_look",
        tables,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("study", sa.String(255), nullable=False, index=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
    )
    sa.Table(
        "dhen_job",
        tables,
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("log", sa.String(64), sa.ForeignKey("dhen_log.fingerprint"), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("cost", sa.Text(), nullable=False),
    )
    sa.Table(
        "dhen_study",
        tables,
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("directory", sa.Text()),
        sa.Column("log", sa.String(64), sa.ForeignKey("dhen_log.fingerprint")),
        sa.Column("cluster", sa.String(64), sa.ForeignKey("dhen_cluster.id")),
        sa.Column("seed", sa.BigInteger()),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"),
    )
    sa.Table(
        "dhen_plan",
        tables,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("job", sa.String(64), sa.ForeignKey("dhen_job.fingerprint"), nullable=False, index=True),
        sa.Column("cluster", sa.String(64), sa.ForeignKey("dhen_cluster.id"), nullable=False),
        sa.Column("strategy", sa.String(128)),
        sa.Column("fits", sa.Boolean(), nullable=False),
        sa.Column("predicted_peak_bytes", sa.BigInteger()),
        sa.Column("predicted_step_seconds", sa.Float()),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
    )
    sa.Table(
        "dhen_trial",
        tables,
        sa.Column("study", sa.String(255), sa.ForeignKey("dhen_study.name"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("job", sa.String(64), sa.ForeignKey("dhen_job.fingerprint"), index=True),
        sa.Column("plan", sa.String(64), sa.ForeignKey("dhen_plan.id")),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("point", sa.Text(), nullable=False),
        sa.Column("curve", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Index("ix_dhen_trial_revision", "study", "revision"),
    )
    sa.Table(
        "dhen_analysis",
        tables,
        sa.Column("study", sa.String(255), primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("trial", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("column", sa.String(255), primary_key=True),
        sa.Column("analysis", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
    )
    sa.Table(
        "dhen_attempt",
        tables,
        sa.Column("study", sa.String(255), primary_key=True),
        sa.Column("trial", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("strategy", sa.String(128), nullable=False),
        sa.Column("executed", sa.String(128)),
        sa.Column("plan", sa.String(64), sa.ForeignKey("dhen_plan.id")),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("predicted_bytes", sa.BigInteger()),
        sa.Column("measured_bytes", sa.BigInteger()),
        sa.Column("predicted_step_seconds", sa.Float()),
        sa.Column("measured_step_seconds", sa.Float()),
        sa.Column("needed_bytes", sa.BigInteger()),
        sa.Column("limit_bytes", sa.BigInteger()),
        sa.Column("seconds", sa.Float()),
        sa.Column("evaluations", sa.Integer()),
        sa.Column("error", sa.Text()),
        sa.Column("replaced", sa.Text()),
        sa.Column("slow_rank", sa.Text()),
        sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
    )
    sa.Table(
        "dhen_comparison",
        tables,
        sa.Column("study", sa.String(255), primary_key=True),
        sa.Column("trial", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("difference_percent", sa.Float(), nullable=False),
        sa.Column("better", sa.String(32), nullable=False),
        sa.Column("comparison", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["study", "trial"], ["dhen_trial.study", "dhen_trial.number"]),
    )
    sa.Table(
        "dhen_retraining",
        tables,
        sa.Column("study", sa.String(255), sa.ForeignKey("dhen_study.name"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("of", sa.Integer(), nullable=False),
        sa.Column("removed", sa.String(255)),
        sa.Column("job", sa.String(64), sa.ForeignKey("dhen_job.fingerprint"), nullable=False, index=True),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["study", "of"], ["dhen_trial.study", "dhen_trial.number"]),
    )
    sa.Table(
        "dhen_driver",
        tables,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("study", sa.String(255), index=True, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("beats", sa.BigInteger(), nullable=False),
    )
    sa.Table(
        "dhen_lease",
        tables,
        sa.Column("study", sa.String(255), primary_key=True),
        sa.Column("what", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column(
            "driver",
            sa.Integer(),
            sa.ForeignKey("dhen_driver.id", ondelete="CASCADE"),
            index=True,
            nullable=False,
        ),
    )
    tables.create_all(op.get_bind())
