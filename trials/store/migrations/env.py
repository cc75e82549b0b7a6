"""What Alembic runs to migrate a ledger: on the connection that is given to it, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from trials.store.database import VERSION_TABLE
from trials.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
)
context.run_migrations()
