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
def test_engines_start_a_candidate_and_move_rows() -> None:
    words = ("--repeats", 2, "--starts", 1)
    starts, transports = tables(run_benchmark_process("benchmarks.processes.engines", *words))
    joined, gone = "s until all have joined", "s until all are gone"
    assert len(starts) == 2
    assert all(number(row[gone]) >= number(row[joined]) > 0 for row in starts)
    assert [row["clients"] for row in transports] == ["1", "2", "4"] * 3
    assert all(number(row["ms per pull"]) > 0 and number(row["ms per push"]) > 0 for row in transports)


@pytest.mark.slow
def test_a_killed_rank_loses_nothing() -> None:
    words = ("--studies", 1, "--seed", 1)
    (rows,) = tables(run_benchmark_process("benchmarks.processes.killed_processes", *words))
    assert [row["killed"] for row in rows] == ["rank", "all"]
    for row in rows:
        assert [row[name] for name in ("lost", "doubled", "different", "left behind")] == ["0"] * 4
