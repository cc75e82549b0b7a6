"""Benchmarks of the server, on small cases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import Run, write_log
from running_benchmarks import number, run_benchmark_process, tables

MODEL = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: linear}]}]}"


def test_mapped_tables_take_no_memory_of_the_worker() -> None:
    words = ("--gb", 0.2, "--requests", 3)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.memory", *words))
    memory, mapped = rows
    assert (memory["served"], mapped["served"], mapped["scores"]) == ("in memory", "--mmap", "equal")
    own = [number(row["after 3 requests: MiB of its own"]) for row in rows]
    assert own[0] - own[1] > 150  # 0.2 GB are 191 MiB


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk, Debian's package of that name")
def test_a_server_is_asked_by_wrk(dhen_search: Run, tmp_path: Path) -> None:
    log, bundle = write_log(tmp_path / "log.csv", 1500), tmp_path / "bundle"
    (tmp_path / "model.yaml").write_text(MODEL)
    dhen_search("train", tmp_path / "model.yaml", "--data", log, "--out", bundle, "training.epochs=1")
    words = (bundle, log, "--workers", 1, "--rows", 1, 4, "--seconds", 1)
    (rows,) = tables(run_benchmark_process("benchmarks.serving.load", *words))
    assert [row["rows per request"] for row in rows] == ["1", "4"]
    for row in rows:
        assert 0 < number(row["median, ms"]) <= number(row["99 %, ms"])
        assert number(row["requests/s, 8 connections"]) > 0
