"""NE against the value of each ordered axis of the space: where on each axis the good candidates lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.edges import front_networks
from dashboards.figures.frame import Frame, frame
from dashboards.figures.style import BLUE, GRID, PALE_GREY, VERMILION, drawing, empty, text
from dashboards.rows import TrialRow, trial_rows
from dashboards.units import known, percent
from trials.ordered_axis import OrderedAxis, Setting
from trials.record import Outcome
from trials.study_record import StudyRecord

TITLE = "Where on each axis the good candidates lie"
COLUMNS, PANEL_HEIGHT = 3, 210
MARGINS = 144
"""Pixels above and below all panels."""
GAP, TALL = 0.06, 0.62
"""Space between two panels as a share of the width, and a panel's share of its row's height."""
TICKS = 4
"""Largest number of labels below a panel that stay apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPoint:
    """One candidate on one axis."""

    row: TrialRow
    value: Setting
    x: float
    """The place where the value is drawn: the number itself on a range, its place among the values of a choice."""
    relative_percent: float
    """NE relative to the baseline."""
    on_front: bool
    """Whether the candidate is on the front, alone or as a member of an average there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPanel:
    """One axis."""

    name: str
    low: float
    """The place where the lowest value is drawn."""
    high: float
    """The place where the highest value is drawn."""
    log: bool
    labels: tuple[str, ...]
    """Names of the values of a choice, from the lowest to the highest; none for a range."""
    points: tuple[AxisPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesInfo:
    """What the figure shows."""

    panels: tuple[AxisPanel, ...]
    """Axes with which candidates have a result, in the order of the space; a setting that each layer has of its
    own is one panel."""
    frame: Frame | None
    """Range of NE relative to the baseline; None where there is no point."""


def axes_info(record: StudyRecord) -> AxesInfo:
    """What the figure shows: candidates with an NE and a baseline to compare with, at their values."""
    on_front = {trial.number for trial in front_networks(record)}
    rows = [row for row in trial_rows(record, record.field) if _has_result(row)]
    by_setting: dict[str, list[OrderedAxis]] = {}
    for axis in record.axes:
        by_setting.setdefault(axis.setting, []).append(axis)
    panels = [_panel(name, axes, rows, on_front) for name, axes in by_setting.items()]
    shown = tuple(panel for panel in panels if panel.points)
    values = {point.row.trial.number: point for panel in shown for point in panel.points}.values()
    always = [point.relative_percent for point in values if point.on_front]
    relative = [point.relative_percent for point in values]
    return AxesInfo(panels=shown, frame=frame(relative, [*always, 0.0]) if relative else None)


def axes_figure(info: AxesInfo) -> go.Figure:
    """A panel per axis, with its ends as lines; lower is better."""
    if info.frame is None:
        return empty("Shown as soon as a candidate has an NE to compare with the baseline's.", title=TITLE)
    lines = math.ceil(len(info.panels) / COLUMNS)
    subtitle = (
        "NE on validation relative to the baseline (the dotted line) against each value; lower is better, "
        "vertical lines are the ends of the space."
    )
    if info.frame.above:
        subtitle += f" {info.frame.above} above these frames."
    traces = [
        _trace(panel, index, on_front)
        for index, panel in enumerate(info.panels)
        for on_front in (False, True)
    ]
    figure = drawing(traces, title=TITLE, subtitle=subtitle, height=MARGINS + PANEL_HEIGHT * lines)
    figure.layout.shapes = [
        shape
        for index, panel in enumerate(info.panels)
        for shape in _laid_out(figure, panel, index, lines, info.frame)
    ]
    figure.update_xaxes(ticks="", showline=False)
    return figure


def _has_result(row: TrialRow) -> bool:
    ended = row.trial.result.outcome in (Outcome.COMPLETED, Outcome.STOPPED)
    return ended and known(row.relative_percent)


def _panel(name: str, axes: list[OrderedAxis], rows: list[TrialRow], on_front: set[int]) -> AxisPanel:
    first = axes[0]  # those of other layers have the same values
    points: dict[tuple[int, Setting], AxisPoint] = {}
    for row in rows:
        for axis in axes:
            value = axis.value(row.trial)
            x = _x(axis, value)
            if x is not None and row.relative_percent is not None:
                points[row.trial.number, value] = AxisPoint(
                    row=row,
                    value=value,
                    x=x,
                    relative_percent=row.relative_percent,
                    on_front=row.trial.number in on_front,
                )
    low, high = (_x(first, end) for end in first.ends)
    assert low is not None
    assert high is not None
    return AxisPanel(
        name=name,
        low=low,
        high=high,
        log=first.log,
        labels=tuple(map(str, first.values)),
        points=tuple(points.values()),
    )


def _x(axis: OrderedAxis, value: Setting) -> float | None:
    """Returns where a value is drawn; None for one that the axis has not."""
    if axis.position(value) is None:
        return None
    if axis.values:
        return float(axis.values.index(value))
    assert isinstance(value, (int, float))
    return float(value)


def _trace(panel: AxisPanel, index: int, on_front: bool) -> go.Scatter:
    points = [point for point in panel.points if point.on_front == on_front]
    look = (
        {"color": BLUE, "size": 9} if on_front else {"color": PALE_GREY, "size": 7, "symbol": "circle-open"}
    )
    return go.Scatter(
        x=[point.x for point in points],
        y=[point.relative_percent for point in points],
        xaxis=_numbered("x", index),
        yaxis=_numbered("y", index),
        mode="markers",
        name="on the front" if on_front else "other candidates",
        legendgroup="front" if on_front else "others",
        showlegend=index == 0,
        marker=look,
        hovertext=[_hover(panel, point) for point in points],
        hoverinfo="text",
    )


def _hover(panel: AxisPanel, point: AxisPoint) -> str:
    value = f"{point.value:.3g}" if isinstance(point.value, float) else str(point.value)
    marks = point.row.marks
    return text(
        f"trial {point.row.trial.number}" + (f": {', '.join(marks)}" if marks else ""),
        point.row.name,
        f"{panel.name} {value}",
        f"NE {percent(point.relative_percent)} to the baseline",
    )


def _laid_out(
    figure: go.Figure, panel: AxisPanel, index: int, lines: int, ne: Frame
) -> list[dict[str, object]]:
    """Puts a panel's two axes at its place; returns lines at the ends of the space and at the baseline."""
    column, line = index % COLUMNS, index // COLUMNS
    left, top = column / COLUMNS + (GAP / 2 if column else 0), 1 - line / lines
    right = (column + 1) / COLUMNS - (GAP / 2 if column < COLUMNS - 1 else 0)
    x, y = _numbered("x", index), _numbered("y", index)
    figure.layout[f"xaxis{index + 1}"] = _x_axis(panel) | {"domain": [left, right], "anchor": y}
    figure.layout[f"yaxis{index + 1}"] = {
        "domain": [top - TALL / lines, top],
        "anchor": x,
        "range": [ne.low, ne.high],
        "ticksuffix": " %",
        "showticklabels": column == 0,
        "nticks": 5,
        "gridcolor": GRID,
        "zeroline": False,
    }
    shape: dict[str, object] = {"type": "line", "layer": "below"}
    vermilion = {"color": VERMILION, "width": 1, "dash": "dot"}
    grey, whole = {"color": PALE_GREY, "width": 1}, f"{y} domain"
    ends = [
        shape | {"x0": end, "x1": end, "y0": 0, "y1": 1, "xref": x, "yref": whole, "line": grey}
        for end in (panel.low, panel.high)
    ]
    baseline = {"x0": 0, "x1": 1, "y0": 0, "y1": 0, "xref": f"{x} domain", "yref": y, "line": vermilion}
    return [*ends, shape | baseline]


def _numbered(axis: str, index: int) -> str:
    """Plotly's name of an axis; the first has no number."""
    return axis if index == 0 else f"{axis}{index + 1}"


def _x_axis(panel: AxisPanel) -> dict[str, object]:
    low, high = (math.log10(panel.low), math.log10(panel.high)) if panel.log else (panel.low, panel.high)
    room = 0.08 * (high - low)
    axis: dict[str, object] = {
        "title": {"text": text(panel.name), "font": {"size": 12}, "standoff": 4},
        "range": [low - room, high + room],
        "type": "log" if panel.log else "linear",
        "gridcolor": GRID,
        "zeroline": False,
        "showgrid": False,
    }
    if panel.labels:
        every = math.ceil(len(panel.labels) / TICKS)
        shown = [place for place in range(len(panel.labels)) if place % every == 0]
        return axis | {"tickvals": shown, "ticktext": [text(panel.labels[place]) for place in shown]}
    return axis | {"tickvals": [panel.low, panel.high], "ticktext": [f"{panel.low:g}", f"{panel.high:g}"]}
