"""Throughput and memory against depth: what the figure draws, and that it opens without a network."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest
from priced import BATCH_SIZE, GIB, priced_ladder

from dashboards.figures.curves import deepest_that_fit, sweep_figure
from dashboards.report.page import write_figure
from dhen.errors import UserError

HBM = 12 * GIB
DEPTHS = range(1, 21)


BY_DEPTH = {depth: priced_ladder(HBM, layers=depth) for depth in reversed(DEPTHS)}


@pytest.fixture(scope="module")
def figure() -> go.Figure:
    return sweep_figure(BY_DEPTH, cluster="two hosts", hbm=HBM, batch_size=BATCH_SIZE)


def test_each_way_to_hold_the_state_is_a_line_without_other_techniques(figure: go.Figure) -> None:
    ways = ["dp", "zero1", "zero2", "zero_offload", "shard_grad_op", "hsdp", "fsdp"]
    assert list(deepest_that_fit(BY_DEPTH)) == ways
    assert [trace.legendgroup for trace in figure.data] == [*ways, *ways]
    alone = {(priced.strategy.name, depth): priced for depth, ladder in BY_DEPTH.items() for priced in ladder}
    for trace in figure.data[len(ways) :]:
        assert list(trace.x) == list(DEPTHS)
        assert list(trace.y) == [alone[trace.legendgroup, depth].memory.total / GIB for depth in DEPTHS]
    for trace in figure.data[: len(ways)]:
        assert list(trace.x) == [
            depth for depth in DEPTHS if alone[trace.legendgroup, depth].memory.total <= HBM
        ]
        for depth, speed in zip(trace.x, trace.y, strict=True):
            assert speed == pytest.approx(BATCH_SIZE / alone[trace.legendgroup, depth].time.total)


def test_lines_end_where_memory_does(figure: go.Figure) -> None:
    deepest = deepest_that_fit(BY_DEPTH)
    assert deepest["dp"] == 5  # a GiB for tables, two for each layer, of twelve
    assert deepest["dp"] < deepest["hsdp"] <= deepest["fsdp"]
    assert f"DP {deepest['dp']}" in figure.layout.title.text
    throughput = {trace.name: list(trace.x) for trace in figure.data if trace.yaxis == "y"}
    assert throughput["DP"] == list(range(1, 6))
    looks = {(trace.line.color, trace.line.dash) for trace in figure.data if trace.yaxis == "y"}
    assert len(looks) == len(deepest)
    assert len({trace.marker.symbol for trace in figure.data}) == len(deepest)
    (limit,) = figure.layout.shapes
    assert (limit.y0, limit.y1, limit.yref) == (12.0, 12.0, "y2")


def test_what_never_fits_and_what_always_fits() -> None:
    ladders = {depth: priced_ladder(GIB, layers=depth) for depth in (1, 2)}
    assert set(deepest_that_fit(ladders).values()) == {None}
    never = sweep_figure(ladders, cluster="small", hbm=GIB, batch_size=BATCH_SIZE)
    assert "nowhere" in never.layout.title.text
    ladders = {depth: priced_ladder(99 * GIB, layers=depth) for depth in (1, 2)}
    always = sweep_figure(ladders, cluster="large", hbm=99 * GIB, batch_size=BATCH_SIZE)
    assert always.layout.title.text == "All fit up to 2 layers"
    assert not sweep_figure({}, cluster="none", hbm=GIB, batch_size=BATCH_SIZE).data


def test_the_page_holds_all_it_needs(figure: go.Figure, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.html"
    write_figure(figure, path)
    page = path.read_text()
    assert page.count("<html") == 1
    assert len(page) > 1_000_000  # plotly.js
    assert 'src="http' not in page
    with pytest.raises(UserError, match="a folder"):
        write_figure(figure, tmp_path)
