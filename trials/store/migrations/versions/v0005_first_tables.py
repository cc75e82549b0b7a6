"""The tables of the first release, as `trials.store.schema` still has them.

The first change of a table after that release writes them out here as they were, and has a migration of its own.
"""

from __future__ import annotations

from alembic import op

from trials.store.schema import METADATA

revision, down_revision = "0005", None


def upgrade() -> None:
    """Makes all tables."""
    METADATA.create_all(op.get_bind())
