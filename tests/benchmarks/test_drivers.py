"""The benchmark of many drivers, on a small case and a real PostgreSQL server."""

from __future__ import annotations

import re

import pytest
from postgresql import served
from running_benchmarks import number, run_benchmark_process, tables
from tools import needs


@pytest.mark.slow
@needs("postgresql")
def test_drivers_share_a_study_whose_trainings_are_made_up() -> None:
    words = ("--drivers", 2, "--candidates", 12, "--marks", 6, "--space", "tiny", "--sampler", "random")
    with served() as server:
        said = run_benchmark_process("benchmarks.drivers.many_drivers", "--storage", server.url, *words)
    (rows,) = tables(said)
    assert [row["candidates"] for row in rows] == ["6", "12"]
    assert all(number(row["per second"]) > 0 for row in rows)
    assert number(rows[1]["database, ms"]) > 0
    # the report need not be written by then
    memory = ("MiB of a driver", "MiB of the one that writes the report")
    assert max(number(rows[1][name]) for name in memory) > 100
    found = re.search(r"(\d+) numbers, each once", said)
    assert found
    assert int(found[1]) >= 12
