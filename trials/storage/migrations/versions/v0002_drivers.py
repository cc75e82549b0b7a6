"""Several drivers of one study: who they are, what each may do, and which commit changed which trial."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    """Adds two tables, and columns that older programs do not look at."""
    op.add_column("dhen_study", sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("dhen_trial", sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_dhen_trial_revision", "dhen_trial", ["study", "revision"])
    op.create_table(
        "dhen_driver",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("study", sa.String(255), index=True, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("beats", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "dhen_lease",
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
