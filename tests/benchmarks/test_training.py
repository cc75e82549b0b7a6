"""Benchmarks of training, on small cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import write_log
from running_benchmarks import number, run_benchmark, run_benchmark_process, tables

SMALL = ("--steps", 2, "--batch", 64, "--threads", 1)


@pytest.mark.slow
def test_ours_trains_beside_plain_pytorch() -> None:
    words = ("--rows", 4000, "--repeats", 1, "--batch", 128, "--threads", 1, "--architectures", "dcn_v2")
    said = run_benchmark("benchmarks.training.beside_peers", *words)
    (rows,) = tables(said)
    assert [row["contestant"] for row in rows] == ["ours", "plain PyTorch"]
    for row in rows:
        assert number(row["examples/s"]) > 0
        assert 0.3 < number(row["test NE"]) < 2
        (share,) = (cell for name, cell in row.items() if name.startswith("share of the"))
        assert 0 < number(share) < 100
    assert "matmul peak" in said
    assert "FuxiCTR is left out" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "points", "names"),
    [
        ("layers", (1, 2), ("layers", "slope of seconds a step")),
        ("rows", (2000, 4000), ("training rows", "slope of seconds a pass")),
        ("tables", (2, 4), ("tables", "slope of seconds a step")),
        ("table-rows", (100, 1000), ("table-rows", "slope of seconds a step")),
    ],
)
def test_cost_grows_along_an_axis(axis: str, points: tuple[int, int], names: tuple[str, str]) -> None:
    words = ("--axis", axis, "--points", *points, *SMALL)
    said = run_benchmark("benchmarks.training.scaling", *words)
    (rows,) = tables(said)
    assert len(rows) == 2
    assert number(rows[0][names[0]]) < number(rows[1][names[0]])
    assert all(number(row["examples/s"]) > 0 for row in rows)
    assert f"{names[1]}: " in said
    assert "needs two points" not in said


@pytest.mark.slow
def test_tables_below_the_device_stand_beside_those_on_it() -> None:
    (rows,) = tables(
        run_benchmark(
            "benchmarks.training.table_levels",
            "--rows",
            300,
            "--batch",
            32,
            "--shares",
            1.0,
            0.3,
            "--exponents",
            1.1,
            "--warm-up",
            5,
            "--steps",
            5,
        )
    )
    assert [row["cache"] for row in rows] == ["100%", "30%"]
    for row in rows:
        assert 0 < number(row["hit rate"].rstrip("%")) < 100
        assert number(row["host, ms"]) > 0
        assert 0 < number(row["predicted"].rstrip("%")) < 100
    assert rows[0]["without counts"] == "100.0%"


@pytest.mark.slow
def test_growing_tables_stand_beside_fixed_ones(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", 600)
    ((row,),) = tables(
        run_benchmark(
            "benchmarks.training.growing_tables", "steps", "--batches", 32, "--rows", 50, "--repeats", 3
        )
    )
    assert number(row["ratio"]) == pytest.approx(
        number(row["growing, ms"]) / number(row["fixed rows, ms"]), abs=0.02
    )
    streamed = tables(
        run_benchmark("benchmarks.training.growing_tables", "ids", "--distinct", 200_000, "--capacity", 1000)
    )[0]
    assert len(streamed) > 3
    assert all(number(row["million ids per second"]) > 0 for row in streamed)
    (rows,) = tables(
        run_benchmark(
            "benchmarks.training.growing_tables",
            "ne",
            log,
            "--columns",
            "user",
            "--shares",
            1.0,
            "--seeds",
            2,
        )
    )
    assert len(rows) == 4
    assert all(0.3 < number(row["NE"].split()[0]) < 2 for row in rows)


@pytest.mark.slow
def test_widths_are_a_share_of_the_peak() -> None:
    said = run_benchmark("benchmarks.training.scaling", "--axis", "widths", "--points", 16, *SMALL)
    (rows,) = tables(said)
    assert len(rows) == 3
    for row in rows:
        (share,) = (cell for name, cell in row.items() if name.startswith("share of the"))
        assert 0 <= number(share) < 100


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1x1", "2x1"])
def test_an_optimisation_stands_beside_fp32(ranks: str) -> None:
    words = ("--rows", 2000, "--ranks", ranks, "--repeats", 1, "--batch", 128, "--layers", 1)
    only = ("--only", "", "table_precision=fp16")
    said = run_benchmark("benchmarks.training.paper_optimisations", *words, *only)
    (rows,) = tables(said)
    assert [row["setting"] for row in rows] == ["fp32", "table_precision=fp16"]
    assert rows[0]["x fp32"] == "1.00"
    assert all(number(row["examples/s"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_accelerators_script_runs_on_a_cpu() -> None:
    words = ("--device", "cpu", "--steps", 1, "--layers", 1, "--width", 16, "--batch", 32)
    (rows,) = tables(run_benchmark("benchmarks.training.accelerator_step", *words))
    assert [row["model"] for row in rows] == ["AdvancedDLRM", *["1-layer DHEN"] * 9]
    assert len({row["held by"] for row in rows}) == 9
    assert all(number(row["examples/s"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_delays_cost_is_told_seed_by_seed() -> None:
    words = ("--rows", 2000, "--repeats", 2, "--layers", 1, "--dim", 4)
    (rows,) = tables(run_benchmark("benchmarks.training.delayed_update", *words))
    assert [row["update"] for row in rows] == ["no delay", "delay after 40 steps"]
    assert all(0.3 < number(row["validation NE"]) < 2 for row in rows)
    assert " to " in rows[1]["from seed to seed"]


@pytest.mark.slow
def test_one_bit_adam_stands_beside_adamw_and_its_links_are_priced() -> None:
    words = ("--rows", 3000, "--repeats", 2, "--layers", 1, "--batch", 32, "--ranks", "1x1")
    (rows,) = tables(run_benchmark("benchmarks.training.one_bit_adam", "ne", *words))
    assert [row["optimizer"] for row in rows] == ["AdamW", "one-bit Adam"]
    assert number(rows[0]["first stage, % of steps"]) == 100
    assert 5 < number(rows[1]["first stage, % of steps"]) < 60
    assert all(0.3 < number(row["validation NE"]) < 2 for row in rows)
    (rows,) = tables(
        run_benchmark("benchmarks.training.one_bit_adam", "links", "--layers", 2, "--width", 512)
    )
    times = [number(row["times as fast"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1 > times[-1]


@pytest.mark.slow
def test_an_increment_stands_beside_all_weights() -> None:
    words = ("--capacities", 500, "--shares", 0.01, 0.5)
    (rows,) = tables(run_benchmark("benchmarks.training.increments", *words))
    assert [row["of them changed"] for row in rows] == ["1.0%", "50.0%"]
    assert number(rows[0]["MiB"]) < number(rows[1]["MiB"])
    assert all(0 < number(row["of all weights"].rstrip("%")) < 110 for row in rows)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Trainings take one thread: how many are fastest depends on the load, and several sum in another order."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.slow
def test_online_stands_beside_frozen(one_core: None) -> None:
    kinds = tables(run_benchmark("benchmarks.training.online_beside_frozen", "--rows", 4000, "--seeds", 2))
    assert len(kinds) == 6
    for *states, costs in (kinds[:3], kinds[3:]):
        for by_day in states:
            assert [row["day"] for row in by_day][-1] == "mean of days"
            assert len(by_day) >= 5
            assert by_day[0]["as it was"] == by_day[0]["online"]
        fresh, kept = ([row["as it was"] for row in by_day] for by_day in states)
        assert fresh == kept
        assert states[0][1]["online"] != states[1][1]["online"]
        assert all(number(row["MiB"]) > 0 for row in costs)
        assert all(number(row["ms"]) > 0 for row in costs)


@pytest.mark.slow
def test_how_long_a_pipelines_ranks_wait_is_measured_beside_the_plan() -> None:
    words = (
        "--stages",
        2,
        "--per-stage",
        2,
        "--schedules",
        "gpipe",
        "zero_bubble",
        "--pass-ms",
        5,
        "--steps",
        2,
    )
    (rows,) = tables(run_benchmark_process("benchmarks.training.pipeline_bubble", *words))
    assert [row["schedule"] for row in rows] == ["gpipe", "zero_bubble"]
    for row in rows:
        assert row["m / (m + p - 1)"] == "80.0%"
        assert 0 < number(row["measured"]) < 100
    assert number(rows[0]["planned"]) < number(rows[1]["planned"]) < 100


@pytest.mark.slow
def test_rows_are_pulled_and_pushed() -> None:
    words = ("--rows", 200, "--batches", 64, "--dims", 4, "--servers", 1, 2, "--steps", 3)
    (rows,) = tables(run_benchmark("benchmarks.servers.pull_and_push", *words))
    (row,) = rows
    assert all(number(row[name]) > 0 for name in row if "ms" in name or "MiB" in name)


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_or_not() -> None:
    words = ("--rows", 3000, "--repeats", 1, "--dense", "light")
    (rows,) = tables(run_benchmark_process("benchmarks.servers.slow_rank", *words))
    assert [row["tables"] for row in rows] == ["async", "semi, staleness 2", "sync"]
    assert all(number(row["examples/s"]) > 0 for row in rows)


@pytest.mark.slow
def test_the_time_until_there_is_progress_again_is_told() -> None:
    (rows,) = tables(run_benchmark_process("benchmarks.servers.recovery", "--rows", 3000, "--kills", 1))
    told = {(row["synchrony"], row["killed"]): row["the others"] for row in rows}
    goes_on = {("async", "other rank"), ("async", "server"), ("semi", "server")}
    assert {which for which, others in told.items() if others == "go on"} == goes_on
    assert len(told) == 9


@pytest.mark.slow
def test_the_cost_of_staleness_is_told(tmp_path: Path) -> None:
    log, out = write_log(tmp_path / "log.csv", 1500), tmp_path / "kept.jsonl"
    words = (log, "--out", out, "--seeds", 2, "--batch-size", 64)
    said = run_benchmark("benchmarks.servers.staleness", *words)
    for rows in tables(said):
        assert [row["tables"] for row in rows][:2] == ["local", "delay of 0"]
        assert "±" in rows[3]["to local"]
        assert number(rows[3]["steps lacked, mean"]) > 1
    trained = len(out.read_text().splitlines())
    assert tables(run_benchmark("benchmarks.servers.staleness", *words)) == tables(said)
    assert len(out.read_text().splitlines()) == trained  # nothing is trained again
