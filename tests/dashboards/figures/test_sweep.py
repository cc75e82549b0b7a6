"""Throughput and memory against depth: what the figure shows, and that it opens without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from priced import BATCH_SIZE, GIB, priced_ladder

from dashboards.figures.sweep import SweepInfo, sweep_figure, sweep_info
from dashboards.report.page import write_figure
from dhen.errors import UserError

HBM = 12 * GIB
DEPTHS = range(1, 21)


@pytest.fixture(scope="module")
def info() -> SweepInfo:
    by_depth = {depth: priced_ladder(HBM, layers=depth) for depth in reversed(DEPTHS)}
    return sweep_info(by_depth, cluster="two hosts", hbm=HBM, batch_size=BATCH_SIZE)


def test_each_way_to_hold_the_state_is_a_line_without_other_techniques(info: SweepInfo) -> None:
    assert [line.dense for line in info.lines] == [
        "dp",
        "zero1",
        "zero2",
        "zero_offload",
        "shard_grad_op",
        "hsdp",
        "fsdp",
    ]
    for line in info.lines:
        assert [point.depth for point in line.points] == list(DEPTHS)
        for point in line.points:
            (same,) = (
                each for each in priced_ladder(HBM, layers=point.depth) if each.strategy.name == line.dense
            )
            assert point.memory_bytes == same.memory.total
            assert point.fits == (point.memory_bytes <= HBM)
            assert point.examples_per_second == pytest.approx(BATCH_SIZE / same.time.total)


def test_lines_end_where_memory_does(info: SweepInfo) -> None:
    deepest = {line.dense: line.deepest for line in info.lines}
    assert deepest["dp"] == 5  # a GiB for tables, two for each layer, of twelve
    assert deepest["dp"] < deepest["hsdp"] <= deepest["fsdp"]
    figure = sweep_figure(info)
    assert f"DP {deepest['dp']}" in figure.layout.title.text
    throughput = {trace.name: list(trace.x) for trace in figure.data if trace.yaxis == "y"}
    memory = {trace.name: list(trace.x) for trace in figure.data if trace.yaxis == "y2"}
    assert throughput["DP"] == list(range(1, 6))
    assert all(xs == list(DEPTHS) for xs in memory.values())
    looks = {(trace.line.color, trace.line.dash) for trace in figure.data if trace.yaxis == "y"}
    assert len(looks) == len(info.lines)
    shapes = {trace.marker.symbol for trace in figure.data}
    assert len(shapes) == len(info.lines)


def test_the_limit_is_drawn(info: SweepInfo) -> None:
    (line,) = sweep_figure(info).layout.shapes
    assert line.y0 == line.y1 == 12.0
    assert line.yref == "y2"


def test_what_never_fits_and_what_always_fits() -> None:
    ladders = {depth: priced_ladder(GIB, layers=depth) for depth in (1, 2)}
    never = sweep_info(ladders, cluster="small", hbm=GIB, batch_size=BATCH_SIZE)
    assert {line.deepest for line in never.lines} == {None}
    assert "nowhere" in sweep_figure(never).layout.title.text
    ladders = {depth: priced_ladder(99 * GIB, layers=depth) for depth in (1, 2)}
    always = sweep_info(ladders, cluster="large", hbm=99 * GIB, batch_size=BATCH_SIZE)
    assert sweep_figure(always).layout.title.text == "All fit up to 2 layers"
    nothing = sweep_info({}, cluster="none", hbm=GIB, batch_size=BATCH_SIZE)
    assert not sweep_figure(nothing).data


def test_the_page_holds_all_it_needs(info: SweepInfo, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.html"
    write_figure(sweep_figure(info), path)
    page = path.read_text()
    assert page.count("<html") == 1
    assert len(page) > 1_000_000  # plotly.js
    assert 'src="http' not in page
    with pytest.raises(UserError, match="a folder"):
        write_figure(sweep_figure(info), tmp_path)
