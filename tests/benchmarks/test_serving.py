"""Benchmarks of the server, on small cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_benchmarks import number, run_benchmark_process, tables
from tools import needs


@pytest.mark.slow
def test_mapped_tables_take_no_memory_of_the_worker() -> None:
    words = ("--gb", 0.1, "--requests", 3)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.memory", *words))
    memory, mapped = rows
    assert (memory["served"], mapped["served"], mapped["scores"]) == ("in memory", "--mmap", "equal")
    own = [number(row["after 3 requests: MiB of its own"]) for row in rows]
    assert own[0] - own[1] > 75  # 0.1 GB are 95 MiB


@pytest.mark.slow
@needs("wrk")
def test_a_server_is_asked_by_wrk(study: Path, log: Path) -> None:
    words = (study / "best", log, "--workers", 1, "--rows", 1, 4, "--seconds", 1)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.load", *words))
    assert [row["rows per request"] for row in rows] == ["1", "4"]
    for row in rows:
        assert 0 < number(row["median, ms"]) <= number(row["99 %, ms"])
        assert number(row["requests/s, 8 connections"]) > 0
        assert number(row["CPU ms per request"]) > 0


@pytest.mark.slow
def test_half_open_connections_shut_nobody_out(study: Path, log: Path) -> None:
    words = (study / "best", log, "--half-open", 50, "--clients", 2, "--seconds", 2)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.half_open", *words))
    (row,) = rows
    assert (number(row["half open"]), number(row["failed"])) == (50, 0)
    assert number(row["requests"]) > 0
