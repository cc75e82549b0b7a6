"""NE against the value of each ordered axis of the space: where on each axis the good candidates lie."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from dashboards.edges import front_networks
from dashboards.figures.style import BLUE, GRID, PALE_GREY, VERMILION, drawing, empty, frame, text
from dashboards.names import known, percent
from dashboards.rows import TrialRow, trial_rows
from trials.records.findings import OrderedAxis, Setting
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome

TITLE = "Where on each axis the good candidates lie"
COLUMNS, PANEL_HEIGHT = 3, 210
MARGINS = 144
"""Pixels above and below all panels."""
GAP, TALL = 0.06, 0.62
"""Space between two panels as a share of the width, and a panel's share of its row's height."""
TICKS = 4
"""Largest number of labels below a panel that stay apart."""


def axes_figure(record: StudyRecord) -> go.Figure | None:
    """A panel per axis that candidates have, with its ends as lines; lower is better. None if the space has no
    axis.

    A setting that each layer has of its own is one panel.
    """
    if not record.axes:
        return None
    ended = (Outcome.COMPLETED, Outcome.STOPPED)
    rows = [
        row
        for row in trial_rows(record, record.field)
        if row.trial.result.outcome in ended and known(row.relative_percent)
    ]
    by_setting: dict[str, list[OrderedAxis]] = {}
    for axis in record.axes:
        by_setting.setdefault(axis.setting, []).append(axis)
    panels = []
    for name, axes in by_setting.items():
        # a candidate whose layers have one value is one point
        values = [(row, axis.value(row.trial), axis) for row in rows for axis in axes]
        points = {
            (row.trial.number, value): (row, value)
            for row, value, axis in values
            if axis.position(value) is not None
        }
        if points:
            panels.append((name, axes[0], [*points.values()]))  # axes of other layers have the same values
    if not panels:
        return empty("Shown as soon as a candidate has an NE to compare with the baseline's.", title=TITLE)
    on_front = {trial.number for trial in front_networks(record)}
    relative = {row.trial.number: row.relative_percent or 0.0 for _, _, placed in panels for row, _ in placed}
    always = [value for number, value in relative.items() if number in on_front]
    seen = frame(list(relative.values()), [*always, 0.0])
    subtitle = (
        "NE on validation relative to the baseline (the dotted line) against each value; lower is better, "
        "vertical lines are the ends of the space."
    )
    if seen.above:
        subtitle += f" {seen.above} above these frames."
    traces = []
    for index, (name, axis, placed) in enumerate(panels):
        others = [point for point in placed if point[0].trial.number not in on_front]
        front = [point for point in placed if point[0].trial.number in on_front]
        for title, group, shown, look in (
            ("other candidates", "others", others, {"color": PALE_GREY, "size": 7, "symbol": "circle-open"}),
            ("on the front", "front", front, {"color": BLUE, "size": 9}),
        ):
            trace = go.Scatter(
                x=[_x(axis, value) for _, value in shown],
                y=[row.relative_percent for row, _ in shown],
                xaxis=_numbered("x", index),
                yaxis=_numbered("y", index),
                mode="markers",
                name=title,
                legendgroup=group,
                showlegend=index == 0,
                marker=look,
                hovertext=[_hover(name, row, value) for row, value in shown],
                hoverinfo="text",
            )
            traces.append(trace)
    lines = math.ceil(len(panels) / COLUMNS)
    figure = drawing(traces, title=TITLE, subtitle=subtitle, height=MARGINS + PANEL_HEIGHT * lines)
    shapes: list[dict[str, object]] = []
    for index, (name, axis, _) in enumerate(panels):
        column, line = index % COLUMNS, index // COLUMNS
        left, top = column / COLUMNS + (GAP / 2 if column else 0), 1 - line / lines
        right = (column + 1) / COLUMNS - (GAP / 2 if column < COLUMNS - 1 else 0)
        x, y = _numbered("x", index), _numbered("y", index)
        ends = [_x(axis, end) for end in axis.ends]
        low, high = map(math.log10, ends) if axis.log else ends
        room = 0.08 * (high - low)
        ticks, labels = ends, [f"{end:g}" for end in ends]
        if axis.values:
            ticks = list(range(0, len(axis.values), math.ceil(len(axis.values) / TICKS)))
            labels = [text(str(axis.values[place])) for place in ticks]
        figure.layout[f"xaxis{index + 1}"] = {
            "title": {"text": text(name), "font": {"size": 12}, "standoff": 4},
            "range": [low - room, high + room],
            "type": "log" if axis.log else "linear",
            "gridcolor": GRID,
            "zeroline": False,
            "showgrid": False,
            "tickvals": ticks,
            "ticktext": labels,
            "domain": [left, right],
            "anchor": y,
        }
        figure.layout[f"yaxis{index + 1}"] = {
            "domain": [top - TALL / lines, top],
            "anchor": x,
            "range": [seen.low, seen.high],
            "ticksuffix": " %",
            "showticklabels": column == 0,
            "nticks": 5,
            "gridcolor": GRID,
            "zeroline": False,
        }
        shape = {"type": "line", "layer": "below"}
        grey = {"color": PALE_GREY, "width": 1}
        for end in ends:
            place = {"x0": end, "x1": end, "y0": 0, "y1": 1, "xref": x, "yref": f"{y} domain"}
            shapes.append(shape | place | {"line": grey})
        baseline = {"x0": 0, "x1": 1, "y0": 0, "y1": 0, "xref": f"{x} domain", "yref": y}
        shapes.append(shape | baseline | {"line": {"color": VERMILION, "width": 1, "dash": "dot"}})
    figure.layout.shapes = shapes
    figure.update_xaxes(ticks="", showline=False)
    return figure


def _x(axis: OrderedAxis, value: Setting) -> float:
    """Where a value of the axis is drawn: a number at itself, one of a choice at its place among the values."""
    if axis.values:
        return float(axis.values.index(value))
    assert isinstance(value, (int, float))
    return float(value)


def _hover(name: str, row: TrialRow, value: Setting) -> str:
    words = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text(
        row.heading, row.name, f"{name} {words}", f"NE {percent(row.relative_percent)} to the baseline"
    )


def _numbered(axis: str, index: int) -> str:
    """Plotly's name of an axis; the first has no number."""
    return axis if index == 0 else f"{axis}{index + 1}"
