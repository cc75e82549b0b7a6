from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
import sqlalchemy as sa


@pytest.fixture
def unsynced() -> Iterator[None]:
    """Databases do not wait for the disk at each commit: what is tested is no crash of the machine."""

    def without_sync(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    sa.event.listen(sa.Engine, "connect", without_sync)
    yield
    sa.event.remove(sa.Engine, "connect", without_sync)
