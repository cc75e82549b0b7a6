"""What became of processes of an attempt that were killed and started anew while the others went on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Adds a column that older programs do not look at."""
    op.add_column("dhen_attempt", sa.Column("replaced", sa.Text()))
