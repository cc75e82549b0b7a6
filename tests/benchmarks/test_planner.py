"""Benchmarks of the planner, on small cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running_benchmarks import number, run_benchmark, tables

from benchmarks.planner.memory_and_latency import Case, composed
from benchmarks.planner.paper_figure6 import CONSTANTS, Setting, changed, changes, point
from benchmarks.planner.plans_on_ranks import MICRO_BATCHES, PRECISIONS, cases
from benchmarks.planner.plans_on_ranks import Case as Of
from benchmarks.reference.step_trace import trace
from dhen.config import DhenConfig
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.ladder import ladder
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy


@pytest.fixture(scope="module")
def pod() -> Cluster:
    return load_cluster("zionex").with_ranks("32x8")


@pytest.mark.slow
def test_planned_memory_is_compared_with_traces(tmp_path: Path) -> None:
    words = ("accuracy", "--cases", 1, "--seed", 6, "--out", tmp_path / "cases.jsonl")
    said = run_benchmark("benchmarks.planner.memory_and_latency", *words)
    cases = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert [case["traced"] > 0 for case in cases] == [True]
    (rows,) = tables(said)
    assert rows[0]["cases"] == "1"
    assert number(rows[0]["median \\|error\\| %"]) < 5


@pytest.mark.slow
def test_planned_memory_is_compared_with_real_ranks() -> None:
    """Of networks so small that TorchRec's buffers, gloo's copies and the model's wrapping are a large part."""
    held = ("dp", "zero1", "zero2", "fsdp+cpu_offload+micro_batches=4")
    size = ("--layers", 2, "--width", 64, "--examples", 128)
    said = run_benchmark("benchmarks.planner.plans_on_ranks", "--ranks", 2, *size, "--strategies", *held)
    (rows,) = tables(said)
    assert [(row["precision"], row["strategy"]) for row in rows] == [
        (precision, strategy) for precision in ("fp32", "bf16") for strategy in held
    ]
    assert all(abs(number(row["plan %"])) < 3 for row in rows), said


def test_chosen_strategies_meet_in_pairs() -> None:
    chosen = cases(4, 64, ())
    met = set[tuple[object, ...]]().union(*(case.pairs for case in chosen))
    ladders = [rung for rung in ladder(2, 2, 64) if rung.micro_batches in MICRO_BATCHES]
    of_ladder = [Of(precision, rung) for precision in PRECISIONS for rung in ladders]
    assert met == set[tuple[object, ...]]().union(*(case.pairs for case in of_ladder))
    assert len(chosen) < len(of_ladder) // 3


@pytest.mark.slow
def test_planned_memory_is_compared_with_real_steps() -> None:
    said = run_benchmark("benchmarks.planner.memory_and_latency", "real", "--cases", 1, "--seed", 1)
    (rows,) = tables(said)
    assert abs(number(rows[0]["estimate %"])) < 5


def test_tables_of_mixed_length_are_planned_as_they_are_traced() -> None:
    """Batches large and networks small, so that embeddings are most of what is held."""
    layer = {"modules": ["linear"], "out_embeddings": 2}
    model = parse_model({"embedding_dim": 32, "table_dim_exponent": 0.4, "layers": [layer]}, "test")
    assert isinstance(model, DhenConfig)
    tables = tuple(Table(name=f"c{i}", rows=10 ** (2 + i)) for i in range(4))
    case = Case("", model, FeatureSchema(tables=tables, numeric=("n",)), Strategy(), 1, 2, 4096, "fp32")
    traced = trace(
        model,
        case.inputs,
        Strategy(),
        hosts=1,
        gpus_per_host=2,
        examples_per_rank=4096,
        training=TrainingConfig(precision="fp32"),
    )
    assert composed(case).total == pytest.approx(traced.total, rel=0.01)


@pytest.mark.slow
def test_figure_6_is_predicted_drawn_and_varied(tmp_path: Path) -> None:
    """HSDP leads with this project's engines in mixed precision, and DP with PyTorch of the paper's time."""
    words = ("--deepest", 8, "--sensitivity", "as above", "UPDATE_MOMENTS", "--out", tmp_path / "figure.html")
    said = run_benchmark("benchmarks.planner.paper_figure6", *words)
    ours, then, sensitivity = tables(said)
    assert [row["layers"] for row in ours] == [row["layers"] for row in then] == ["1", "8"]
    assert all(number(row["HSDP"]) > number(row["DP"]) > 1 for row in ours)
    assert all(number(row["DP"]) > number(row["HSDP"]) > 1 for row in then)
    assert [row["changed"] for row in sensitivity] == [
        "as above",
        "UPDATE_MOMENTS x 0.8",
        "UPDATE_MOMENTS x 1.2",
        "PyTorch 1.11, UPDATE_MOMENTS x 0.8",
        "PyTorch 1.11, UPDATE_MOMENTS x 1.2",
    ]
    assert "HSDP fits to 8" in said
    assert "DP at 8 layers in mixed precision" in said
    assert "Throughput relative to FSDP" in (tmp_path / "figure.html").read_text()


def test_every_change_of_figure_6_can_be_made_and_each_constant_moves_the_prediction(pod: Cluster) -> None:
    """One depth of each in place of the table's, which takes minutes."""
    before = point(8, Setting(), pod).seconds
    for constant in CONSTANTS:
        with changed(constant, 1.2):
            assert point(8, Setting(), pod).seconds != before, constant
    assert point(8, Setting(), pod).seconds == before
    names = []
    for each in changes():
        if each.constant is not None:
            with changed(*each.constant):
                assert point(1, each.setting, pod).seconds["dp"] > 0
        names.append(each.name)
    assert len(set(names)) == len(names) > 30


@pytest.mark.slow
def test_placements_are_compared() -> None:
    words = ("--ranks", "1x2", "--tables", 8, "--seeds", 1, "--dim", 32)
    said = run_benchmark("benchmarks.planner.table_balance", *words)
    (rows,) = tables(said)
    ours = rows[0]
    assert ours["placement"].startswith("LPT with column splitting")
    assert number(ours["heaviest over mean"]) >= 1
    assert "at most 1.05 times the larger of mean and largest indivisible shard: holds" in said


@pytest.mark.slow
def test_zero_offload_lets_one_device_hold_a_network_many_times_as_deep() -> None:
    """Plain DP's peak has 20 bytes for each parameter, ZeRO-Offload's 2: what the limit is depends on the rest."""
    words = ("--hbm", "4GiB", "--width", 2048, "--held", "dp", "zero_offload")
    plain, offloaded = tables(run_benchmark("benchmarks.planner.offload_depth", *words))[0]
    items = ("weights", "moments", "gradients")
    for row, expected in ((plain, (6.0, 8.0, 6.0)), (offloaded, (2.0, 0.0, 0.0))):
        sizes = [number(row[f"{item}, bytes per parameter"]) for item in items]
        assert sizes == pytest.approx(expected, abs=0.1)
    assert int(offloaded["layers"]) > 8 * int(plain["layers"])
    assert number(offloaded["host, bytes per parameter"]) == pytest.approx(20, abs=0.1)
