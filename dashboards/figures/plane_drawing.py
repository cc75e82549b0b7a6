"""NE against what it costs, drawn: colour and shape by memory technique, size by memory, intervals on winners.

Each marker has its trial's number as `customdata`, by which a page knows what was clicked.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboards.figures.plane_points import FLOPS, FrontInfo, FrontPoint
from dashboards.figures.style import BLUE, GREY, INK, VERMILION, drawing, legend_below, text
from dashboards.figures.techniques import looks
from dashboards.units import byte_size, decimals, milliseconds, percent, ratio

HEIGHT = 520
SIZE, SMALLEST, LARGEST = 9.0, 7.0, 20.0
"""Diameters of markers in pixels: where all take about the same memory, for the least, and for the most."""
DIFFER = 1.1
"""Ratio of the largest to the smallest memory from which markers differ in size."""
FAINT = 0.6
"""Opacity of what is not on the front."""


def drawn_against(info: FrontInfo, *, title: str, subtitle: str) -> go.Figure:
    """The figure of points that there are, with their price on a logarithmic axis."""
    assert info.frame is not None
    traces = [
        *_networks_line(info),
        _front_line(info),
        *_fields(info),
        *_intervals(info),
        *_marked(info),
    ]
    subtitle = " ".join((subtitle, *_readings(info)))
    if info.frame.above:
        subtitle += f" {info.frame.above} above this frame; a double click shows all."
    figure = legend_below(drawing(traces, title=title, subtitle=subtitle, height=HEIGHT))
    figure.update_xaxes(type="log", minor_showgrid=False)
    figure.update_yaxes(title_text="NE on validation", range=[info.frame.low, info.frame.high])
    if info.baseline:
        figure.add_hline(
            info.baseline.ne, line={"color": VERMILION, "width": 1, "dash": "dot"}, layer="below"
        )
    _draw_floor(figure, info)
    return figure


def _readings(info: FrontInfo) -> list[str]:
    """How to read colour, size and bars, where the figure has them."""
    sizes = _sizes(info)
    readings = []
    if len(info.techniques) > 1:
        readings.append("Colour and shape: memory technique.")
    if _differ(sizes):
        readings.append(
            f"Area: predicted peak memory of a rank, {byte_size(min(sizes))} to {byte_size(max(sizes))}."
        )
    if info.intervals:
        readings.append(
            "Bars: where retrainings place winners on test, as 95 % intervals of the difference to the baseline."
        )
    return readings


def _sizes(info: FrontInfo) -> list[int]:
    return [point.memory_bytes for point in info.candidates if point.memory_bytes]


def _differ(sizes: Sequence[int]) -> bool:
    return bool(sizes) and max(sizes) > DIFFER * min(sizes)


def _diameter(point: FrontPoint, sizes: Sequence[int]) -> float:
    """Area grows with memory, so that twice the ink is twice the bytes, down to the smallest that is seen."""
    if not _differ(sizes) or not point.memory_bytes:
        return SIZE
    share: float = (point.memory_bytes / max(sizes)) ** 0.5
    return max(SMALLEST, LARGEST * share)


def _hover(point: FrontPoint, info: FrontInfo) -> str:
    row, baseline = point.row, info.baseline
    flops, serving_ms = row.trial.job.flops, row.trial.plan.serving_ms
    times = ratio(point.price / baseline.price) if baseline else ""
    relative = (
        f" ({percent(row.relative_percent)} to the baseline)" if row.relative_percent is not None else ""
    )
    return text(
        f"trial {point.number}" + (f": {', '.join(row.marks)}" if row.marks else ""),
        row.name,
        f"NE {decimals(point.ne, 5)}{relative}",
        "stopped before its budget was used up" if point.stopped else "",
        info.price.words(point.price) + (f" ({times} the baseline's)" if times else ""),
        FLOPS.words(flops) if info.price is not FLOPS and flops is not None else "",
        f"{milliseconds(serving_ms)} forward" if serving_ms is not None else "",
        _memory(point),
    )


def _memory(point: FrontPoint) -> str:
    """The technique and what it takes: `hsdp+cpu_offload, 5.1 MiB per rank (trained here with dp)`."""
    if point.technique is None:
        return ""
    takes = f", {byte_size(point.memory_bytes)} per rank predicted" if point.memory_bytes else ""
    executed = point.row.trial.result.technique
    planned = point.row.trial.plan.technique
    here = f" (trained here with {executed})" if executed is not None and executed != planned else ""
    return f"{point.technique}{takes}{here}"


def _scatter(points: Sequence[FrontPoint], info: FrontInfo, **style: object) -> go.Scatter:
    return go.Scatter(
        x=[point.price for point in points],
        y=[point.ne for point in points],
        customdata=[point.number for point in points],
        hovertext=[_hover(point, info) for point in points],
        hoverinfo="text",
        **style,
    )


def _fields(info: FrontInfo) -> list[go.Scatter]:
    """Networks by technique, and averages; those on the front stand out."""
    averages = [point for point in info.candidates if point.average]
    traces = []
    for technique, look in looks(info.techniques).items():
        own = [point for point in info.candidates if point.technique == technique]
        own.sort(key=lambda point: point.stopped)  # the legend has the first one's symbol
        name = technique if len(info.techniques) > 1 else f"candidates ({technique})"
        traces += [_field(own, info, name, look.color, look.symbol)] if own else []
    return [*traces, *([_field(averages, info, "averages", BLUE, "triangle-up")] if averages else [])]


def _field(points: Sequence[FrontPoint], info: FrontInfo, name: str, color: str, symbol: str) -> go.Scatter:
    on_front = {point.number for point in info.front}
    sizes = _sizes(info)
    if any(point.stopped for point in points):
        name += " (open: stopped early)"
    marker = {
        "color": color,
        "symbol": [f"{symbol}-open" if point.stopped else symbol for point in points],
        "size": [_diameter(point, sizes) for point in points],
        "opacity": [1.0 if point.number in on_front else FAINT for point in points],
        "line": {
            "color": INK,
            "width": [1.5 if point.number in on_front or point.stopped else 0.5 for point in points],
        },
    }
    return _scatter(points, info, mode="markers", name=text(name), marker=marker)


def _front_line(info: FrontInfo) -> go.Scatter:
    """A step line: between two points of the front the cheaper one is the best that such a price buys."""
    line = {"color": BLUE, "width": 2, "shape": "hv"}
    return _scatter(info.front, info, mode="lines", name="Pareto front", line=line)


def _networks_line(info: FrontInfo) -> list[go.Scatter]:
    """The front without averages, so that what averages gain, and at which price, is the gap between two lines."""
    if not info.networks_front:
        return []
    line = {"color": BLUE, "width": 1.5, "dash": "dot", "shape": "hv"}
    name = "front of single networks"
    return [_scatter(info.networks_front, info, mode="lines", name=name, line=line)]


def _intervals(info: FrontInfo) -> list[go.Scatter]:
    if not info.intervals:
        return []
    error = {
        "type": "data",
        "symmetric": False,
        "array": [each.high - each.ne for each in info.intervals],
        "arrayminus": [each.ne - each.low for each in info.intervals],
        "color": INK,
        "thickness": 1.5,
        "width": 6,
    }
    hovers = [
        text(
            f"trial {each.number}, retrained: is it better than the baseline? {each.words}",
            f"95 % interval on test, on this axis: {decimals(each.low, 5)} to {decimals(each.high, 5)}",
        )
        for each in info.intervals
    ]
    return [
        go.Scatter(
            x=[each.price for each in info.intervals],
            y=[each.ne for each in info.intervals],
            error_y=error,
            mode="markers",
            marker={"symbol": "line-ew", "size": 12, "color": INK, "line": {"color": INK, "width": 2}},
            name="winners retrained, 95 % interval",
            customdata=[each.number for each in info.intervals],
            hovertext=hovers,
            hoverinfo="text",
        )
    ]


def _marked(info: FrontInfo) -> list[go.Scatter]:
    """Baseline, knee and best: a shape of their own and a label beside it."""
    same = info.best is not None and info.best == info.knee
    chosen = [
        (info.baseline, "baseline", "square-open", VERMILION, "top right"),
        (None if same else info.knee, "knee", "diamond-open", BLUE, "bottom left"),
        (info.best, "best and knee" if same else "best", "star-open", BLUE, "bottom center"),
    ]
    return [
        _scatter(
            (point,),
            info,
            mode="markers+text",
            text=[label],
            textposition=position,
            textfont={"color": colour},
            marker={"color": colour, "symbol": symbol, "size": 22, "line": {"width": 2}},
            cliponaxis=False,
            showlegend=False,
        )
        for point, label, symbol, colour, position in chosen
        if point is not None
    ]


def _draw_floor(figure: go.Figure, info: FrontInfo) -> None:
    if info.floor is None:
        return
    label = f"floor {decimals(info.floor, 5)}"
    if info.floor_in_frame:
        line = {"color": GREY, "width": 1, "dash": "dash"}
        position = "bottom left"
        figure.add_hline(
            info.floor, line=line, annotation_text=label, annotation_position=position, layer="below"
        )
        return
    where = {"x": 1, "xref": "paper", "xanchor": "right", "y": 0, "yref": "paper", "yanchor": "bottom"}
    figure.add_annotation(text=f"{label}, below this frame", showarrow=False, **where)
