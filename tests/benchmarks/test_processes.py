"""Benchmarks of processes, on small cases."""

from __future__ import annotations

import pytest
from running_benchmarks import number, run_benchmark, run_benchmark_process, tables


@pytest.mark.slow
def test_techniques_train_to_the_losses_of_one_process() -> None:
    (rows,) = tables(run_benchmark("benchmarks.processes.technique_equality", "--ranks", 1))
    assert rows[0]["technique"] == "dp"
    assert len(rows) >= 3
    assert {row["as it should be"] for row in rows} == {"yes"}


@pytest.mark.slow
def test_three_ways_to_start_ranks_are_timed() -> None:
    (rows,) = tables(run_benchmark_process("benchmarks.processes.rank_start_time", "--repeats", 1))
    assert len(rows) == 4
    joined, gone = "s until all have joined", "s until 10 steps are done and all are gone"
    assert all(number(row[gone]) >= number(row[joined]) > 0 for row in rows)


@pytest.mark.slow
def test_a_killed_rank_loses_nothing() -> None:
    words = ("--studies", 1, "--seed", 1)
    (rows,) = tables(run_benchmark_process("benchmarks.processes.killed_processes", *words))
    assert [row["killed"] for row in rows] == ["rank", "all"]
    for row in rows:
        assert [row[name] for name in ("lost", "doubled", "different", "left behind")] == ["0"] * 4
