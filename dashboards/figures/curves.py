"""NE in the course of training: candidates relative to the baseline, a table of the paper's by milestone, and a
model that goes on learning by period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREY,
    PALE_BLUE,
    PALE_GREY,
    VERMILION,
    drawing,
    empty,
    frame,
    text,
)
from dashboards.names import known, percent, si, trial_name
from dashboards.rows import TrialRow, find, trial_rows
from trials.records.study_record import StudyRecord, relative_ne_curve

MILESTONE_COLORS = (BLUE, VERMILION, GREY)
MILESTONE_DASHES = ("solid", "dash", "dot", "dashdot")
MILESTONE_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
"""Rows differ in dash and symbol too, never in colour alone."""


def curves_figure(record: StudyRecord) -> go.Figure:
    """Learning curves relative to the baseline at the same numbers of examples, as the paper's tables give NE: the
    baseline is the line at 0, below is better.

    A trial with another trial's result is left out, for it would cover that curve.
    """
    title = "Learning curves against the baseline"
    baseline = find(record, record.baseline)
    if baseline is None or not baseline.result.curve:
        return empty("Shown as soon as the baseline has been trained.", title=title)
    reference = baseline.result.curve
    lines = []
    for row in trial_rows(record, [trial for trial in record.field if trial.origin.reused_from is None]):
        pairs = relative_ne_curve(row.trial.result.curve, reference)
        points = [(examples, value) for examples, value in pairs if known(value)]
        if points:
            lines.append((row, points))
    if not lines:
        return empty("Shown as soon as a candidate has been evaluated.", title=title)
    # the frame fits the second half of training and the ends of shorter curves: early values would press it flat
    half = reference.examples[-1] / 2
    late = [value for _, points in lines for examples, value in points if examples >= half]
    early_ends = [points[-1][1] for _, points in lines if points[-1][0] < half]
    seen = frame(late + early_ends, always=[0.0])
    about = f"trial {baseline.number}, {trial_name(baseline)}"
    subtitle = f"NE in percent of the baseline's ({about}) at the same number of training examples."
    if any(not seen.low <= value <= seen.high for _, points in lines for _, value in points):
        subtitle += " The frame fits the second half of training; a double click shows all."
    plain = [line for line in lines if not {"best", "knee"} & set(line[0].marks)]
    others = [line for line in plain if "front" not in line[0].marks]
    front = [line for line in plain if "front" in line[0].marks]
    traces = []
    # many curves are one trace with gaps: one entry in the legend, and quick to draw for hundreds
    for group, name, color, width in (
        (others, "candidates", PALE_GREY, 1),
        (front, "Pareto front", PALE_BLUE, 1.5),
    ):
        if group:
            line = {"color": color, "width": width}
            traces.append(_curves(group, name=name, line=line, marker={"size": 3, "color": color}))
    for row, points in lines:
        names = [mark for mark in ("best", "knee") if mark in row.marks]
        if names:
            dash, symbol = ("solid", "star") if "best" in names else ("dash", "diamond")
            trace = _curves(
                [(row, points)],
                name=f"{' and '.join(names)} (trial {row.trial.number})",
                line={"color": BLUE, "width": 2.5, "dash": dash},
                marker={"color": BLUE, "size": 7, "symbol": symbol},
            )
            traces.append(trace)
    figure = drawing(traces, title=title, subtitle=subtitle, height=430)
    figure.add_hline(0, line={"color": VERMILION, "width": 1.5}, annotation_text="baseline", layer="below")
    figure.update_annotations(font={"color": VERMILION}, selector={"text": "baseline"})
    figure.update_xaxes(title_text="training examples seen", tickformat="~s", rangemode="tozero")
    figure.update_yaxes(title_text="NE against the baseline", ticksuffix=" %", range=[seen.low, seen.high])
    return figure


def _curves(lines: Sequence[tuple[TrialRow, Sequence[tuple[int, float]]]], **style: object) -> go.Scatter:
    """Curves in one trace, with a gap after each."""
    xs: list[int | None] = []
    ys: list[float | None] = []
    hovers: list[str] = []
    for row, points in lines:
        xs += [*(examples for examples, _ in points), None]
        ys += [*(value for _, value in points), None]
        hovers += [
            text(row.heading, row.name, f"{percent(value)} at {si(examples)} examples")
            for examples, value in points
        ]
        hovers.append("")
    return go.Scatter(x=xs, y=ys, hovertext=hovers, hoverinfo="text", mode="lines+markers", **style)


def milestones_figure(
    lines: Mapping[str, Sequence[tuple[float, float | None] | None]],
    milestones: Sequence[int],
    *,
    title: str,
    reference: str,
) -> go.Figure:
    """A line per row of a table; the reference is the line at 0, below is better.

    Args:
        lines: by name of a row, NE relative to the reference in percent at each milestone, and half its interval
            if there is one. Rows without any value are left out.
        milestones: numbers of training examples seen.
        title: what is seen.
        reference: name of the row that the others are compared with.
    """
    subtitle = (
        f"NE in percent of {reference}'s at the same number of training examples: mean over seeds; "
        "bars are intervals."
    )
    traces = []
    for index, (name, values) in enumerate((name, each) for name, each in lines.items() if any(each)):
        points = [(at, value) for at, value in zip(milestones, values, strict=True) if value is not None]
        color = MILESTONE_COLORS[index % len(MILESTONE_COLORS)]
        dash = MILESTONE_DASHES[index // len(MILESTONE_COLORS) % len(MILESTONE_DASHES)]
        symbol = MILESTONE_SYMBOLS[index % len(MILESTONE_SYMBOLS)]
        trace = go.Scatter(
            x=[examples for examples, _ in points],
            y=[mean for _, (mean, _) in points],
            error_y={"type": "data", "array": [half or 0.0 for _, (_, half) in points], "thickness": 1},
            mode="lines+markers",
            name=text(name),
            line={"color": color, "width": 2, "dash": dash},
            marker={"color": color, "size": 8, "symbol": symbol},
        )
        traces.append(trace)
    figure = drawing(traces, title=title, subtitle=subtitle, height=520)
    figure.add_hline(0, line={"color": GREY, "width": 1.5}, annotation_text=reference, layer="below")
    figure.update_xaxes(title_text="training examples seen", tickformat="~s", rangemode="tozero")
    figure.update_yaxes(title_text=f"NE against {reference}", ticksuffix=" %")
    figure.update_layout(legend={"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"})
    return figure


class PeriodPoint(NamedTuple):
    """One period of a model that goes on learning."""

    name: str
    """The time at which it begins, or its number."""
    examples: int
    online: float
    """NE of the model that had been trained on all periods before."""
    frozen: float
    """NE of the model as it was at the beginning."""
    ne_floor: float | None = None
    """Lowest NE that any model can reach, if it is known."""


def periods_figure(points: Sequence[PeriodPoint]) -> go.Figure:
    """NE by period: a line for the model that learns, one for it as it was, one for the floor if it is known."""
    title = "NE by period, each scored before it is trained on"
    if not points:
        return empty("No period has been trained on.", title=title)
    lines: list[tuple[str, list[float | None], str, str, str]] = [
        ("as it was", [point.frozen for point in points], VERMILION, "dash", "square"),
        ("online", [point.online for point in points], BLUE, "solid", "circle"),
    ]
    floors = [point.ne_floor for point in points]
    if any(floor is not None for floor in floors):
        lines.append(("lowest possible", floors, GREY, "dot", "line-ew"))
    traces = [
        go.Scatter(
            x=[point.name for point in points],
            y=values,
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 2, "dash": dash},
            marker={"color": color, "size": 7, "symbol": symbol},
            hovertext=[
                ""
                if value is None
                else text(f"{point.name}, {name}", f"NE {value:.5f}", f"{point.examples:,} examples")
                for point, value in zip(points, values, strict=True)
            ],
            hoverinfo="text",
        )
        for name, values, color, dash, symbol in lines
    ]
    subtitle = "Lower is better; 1 is a constant prediction. Both models score rows that neither has seen."
    figure = drawing(traces, title=title, subtitle=subtitle, height=460)
    figure.update_xaxes(title_text="period", type="category")
    figure.update_yaxes(title_text="NE")
    return figure
