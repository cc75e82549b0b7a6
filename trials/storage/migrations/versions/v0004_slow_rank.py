"""Which ranks of an attempt were much slower than the others, where, since when, and what came of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Adds a column that older programs do not look at."""
    op.add_column("dhen_attempt", sa.Column("slow_rank", sa.Text()))
