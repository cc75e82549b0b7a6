"""Benchmarks of preparing a log and of parts of the model, on small cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_benchmarks import number, run_benchmark, tables


@pytest.mark.slow
def test_preparation_says_speed_and_memory() -> None:
    (rows,) = tables(run_benchmark("benchmarks.data.preparation_speed", "--rows", 2000, "--cores", 1, 2))
    assert [row["cores"] for row in rows] == ["1", "2"]
    row = rows[0]
    assert number(row["rows"]) == 2000
    assert number(row["rows/s"]) > 0
    assert number(row["peak RSS MiB"]) >= number(row["imports alone MiB"]) > 0


@pytest.mark.slow
def test_ensembles_are_compared_over_mixes_and_what_is_trained_is_kept(log: Path, tmp_path: Path) -> None:
    words = (log, "--out", tmp_path / "kept.jsonl", "--seeds", 1, "--mixes", 2)
    (rows,) = tables(run_benchmark("benchmarks.models.ensembles_over_mixes", *words))
    assert [row["ensemble"] for row in rows] == ["sum", "weighted_sum", "gated", "concat"]
    assert sum(number(row["best in mixes"]) for row in rows) == 2
    assert number(rows[0]["FLOPs to the sum's"]) == 1
    kept = (tmp_path / "kept.jsonl").read_text()
    assert len(kept.splitlines()) == 8
    assert tables(run_benchmark("benchmarks.models.ensembles_over_mixes", *words)) == [rows]
    assert (tmp_path / "kept.jsonl").read_text() == kept


@pytest.mark.slow
def test_a_module_is_compared_with_the_first_of_its_group(log: Path, tmp_path: Path) -> None:
    words = ("--seeds", 2, "--groups", "alone", "--networks", "linear", "--raw", tmp_path / "raw.json")
    (rows,) = tables(run_benchmark("benchmarks.models.modules_and_norms", log, *words))
    assert [row["what"] for row in rows] == ["mlp", "linear"]
    raw = json.loads((tmp_path / "raw.json").read_text())["alone"]
    percent = [100 * (ne / of_mlp - 1) for ne, of_mlp in zip(raw["linear"], raw["mlp"], strict=True)]
    assert number(rows[0]["of the group's first"]) == 0
    assert number(rows[1]["of the group's first"]) == pytest.approx(sum(percent) / 2, abs=0.01)
    assert all(number(row["FLOPs"]) > 0 for row in rows)


@pytest.mark.slow
def test_networks_are_compared_with_and_without_buckets(log: Path) -> None:
    words = ("--seeds", 2, "--counts", 4, "--networks", 1)
    (rows,) = tables(run_benchmark("benchmarks.models.number_buckets", log, *words))
    assert [row["buckets"] for row in rows] == ["none", "4", "4", "4"]
    assert [number(row["beside apart"]) if row["beside apart"] else None for row in rows[:3]][::2] == [
        None,
        0.0,
    ]
    assert "interpolated" in rows[3]["network"]
    assert number(rows[3]["beside apart"]) != 0.0
    assert all(0.3 < number(row["validation NE"]) < 2 for row in rows)


@pytest.mark.slow
def test_sparse_attention_is_timed_beside_dense_attention_and_its_memory_grows() -> None:
    words = ("--embeddings", 24, 48, "--examples", 2, "--repeats", 1, "--dim", 8, "--block-size", 2)
    layouts = ("--layouts", "sliding_window", "--precisions", "fp32")
    rows, growth = tables(run_benchmark("benchmarks.models.sparse_attention", "speed", *words, *layouts))
    assert [row["attention"] for row in rows[:5]] == [
        "dense",
        "dense, kernel",
        "masked",
        "masked, kernel",
        "sliding_window",
    ]
    assert all(number(row["CPU ms"]) > 0 and number(row["peak MiB"]) > 0 for row in rows)
    power = {row["attention"]: number(row["memory grows with the power"]) for row in growth}
    assert power["sliding_window"] < 1.3 < power["dense"]


@pytest.mark.slow
def test_sparse_attention_is_compared_in_ne() -> None:
    words = ("--columns", 6, "--rows", 1000, "--seeds", 2, "--block-size", 1, "--shuffled")
    said = run_benchmark("benchmarks.models.sparse_attention", "ne", *words, "--layouts", "bigbird")
    (rows,) = tables(said)
    assert [row["module"] for row in rows] == ["attention", "bigbird"]
    assert number(rows[1]["FLOPs"]) < number(rows[0]["FLOPs"])
    assert "±" in rows[1]["to attention"]
