"""Throughput and memory of each way to hold the dense state against depth (the paper's Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import GREY, drawing, empty, text
from dashboards.figures.techniques import LOOKS, NAMES
from dashboards.units import byte_size, si
from trials.planner.estimates import PricedStrategy

HEIGHT = 720
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """Predictions for one depth."""

    depth: int
    memory_bytes: int
    """Predicted peak on the fullest rank."""
    examples_per_second: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """One way to hold the dense state, without other techniques."""

    dense: str
    points: tuple[SweepPoint, ...]
    """Points in order of depth."""

    @property
    def deepest(self) -> int | None:
        """The greatest depth that fits; None where none does."""
        return max((point.depth for point in self.points if point.fits), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepInfo:
    """What the figure shows."""

    cluster: str
    hbm: int
    lines: tuple[SweepLine, ...]
    """One line for each way that the cluster offers, in the order of the ladder."""


def sweep_info(
    by_depth: Mapping[int, Sequence[PricedStrategy]], *, cluster: str, hbm: int, batch_size: int
) -> SweepInfo:
    """What the figure shows, from each depth's priced ladder; `batch_size` is that of a step over all ranks."""
    points: dict[str, list[SweepPoint]] = {}
    for depth, strategies in sorted(by_depth.items()):
        for priced in strategies:
            dense = priced.strategy.dense
            if set(priced.strategy.techniques) - {dense}:
                continue
            point = SweepPoint(
                depth=depth,
                memory_bytes=priced.memory.total,
                examples_per_second=batch_size / priced.seconds_per_batch,
                fits=priced.fits,
            )
            points.setdefault(dense, []).append(point)
    lines = [SweepLine(dense=dense, points=tuple(points[dense])) for dense in LOOKS if dense in points]
    return SweepInfo(cluster=cluster, hbm=hbm, lines=tuple(lines))


def sweep_figure(info: SweepInfo) -> go.Figure:
    """The figure: throughput above, as far as the memory suffices; memory below, with the limit of a rank."""
    if not info.lines:
        return empty("No depth was priced.", title="Throughput and memory against depth")
    traces = [_throughput(line) for line in info.lines] + [_memory(line) for line in info.lines]
    subtitle = (
        f"Predicted for {info.cluster}, a rank having {byte_size(info.hbm)}; "
        "throughput only where the memory suffices (above), memory at the peak (below)."
    )
    figure = drawing(traces, title=_title(info), subtitle=subtitle, height=HEIGHT)
    figure.update_xaxes(title_text="layers", anchor="y2")
    figure.update_layout(
        yaxis={"domain": [0.55, 1], "title": {"text": "examples per second"}, "rangemode": "tozero"},
        yaxis2={
            "domain": [0, 0.45],
            "title": {"text": "GiB per rank"},
            "rangemode": "tozero",
            "gridcolor": figure.layout.yaxis.gridcolor,
            "zeroline": False,
        },
    )
    line = {"color": GREY, "width": 1, "dash": "dash"}
    figure.add_hline(info.hbm / GIB, line=line, yref="y2", annotation_text="memory of a rank")
    return figure


def _throughput(line: SweepLine) -> go.Scatter:
    points = [point for point in line.points if point.fits]
    return _scatter(line.dense, points, [point.examples_per_second for point in points], "y")


def _memory(line: SweepLine) -> go.Scatter:
    trace = _scatter(line.dense, line.points, [point.memory_bytes / GIB for point in line.points], "y2")
    return trace.update(showlegend=False)


def _scatter(dense: str, points: Sequence[SweepPoint], y: Sequence[float], axis: str) -> go.Scatter:
    look = LOOKS[dense]
    return go.Scatter(
        x=[point.depth for point in points],
        y=list(y),
        yaxis=axis,
        mode="lines+markers",
        name=NAMES[dense],
        legendgroup=dense,
        line={"color": look.color, "width": 2, "dash": look.dash},
        marker={"color": look.color, "size": 7, "symbol": look.symbol},
        hovertext=[_hover(dense, point) for point in points],
        hoverinfo="text",
    )


def _hover(dense: str, point: SweepPoint) -> str:
    return text(
        f"{NAMES[dense]}, {point.depth} layers",
        f"{si(point.examples_per_second)} examples per second",
        byte_size(point.memory_bytes) + ("" if point.fits else ": does not fit"),
    )


def _title(info: SweepInfo) -> str:
    """How many layers fit with each way to hold the dense state, where the ways differ."""
    last = max(point.depth for line in info.lines for point in line.points)
    ends = [(NAMES[line.dense], line.deepest) for line in info.lines]
    if all(depth == last for _, depth in ends):
        return f"All fit up to {last} layers"
    limits = [f"{name} {'nowhere' if depth is None else depth}" for name, depth in ends]
    return f"Layers that fit: {', '.join(limits)}"
