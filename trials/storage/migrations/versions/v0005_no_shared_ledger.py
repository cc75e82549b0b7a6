"""Weights that other studies could fetch by way of a shared ledger, which there is no more."""

from __future__ import annotations

from alembic import op

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    """Drops a table that nothing reads."""
    op.drop_table("dhen_weights")
