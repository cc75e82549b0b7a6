"""A database of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import postgresql
import pytest
from tools import needs


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=needs("postgresql"))])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'study.db'}"
        return
    with postgresql.served() as server:
        yield server.url
