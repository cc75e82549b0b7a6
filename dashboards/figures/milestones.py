"""NE relative to a reference row by milestone, with intervals: the paper's tables as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, GREY, VERMILION, drawing, text

HEIGHT = 520
COLORS = (BLUE, VERMILION, GREY)
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
"""Rows differ in dash and symbol too, never in colour alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilestoneLine:
    """One row of a table."""

    name: str
    values: tuple[tuple[float, float | None] | None, ...]
    """NE relative to the reference in percent at each milestone, and half its interval where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilestonesInfo:
    """What the figure shows."""

    title: str
    reference: str
    milestones: tuple[int, ...]
    """Numbers of training examples seen."""
    lines: tuple[MilestoneLine, ...]
    """Lines that have a value at all."""


def milestones_info(
    lines: Sequence[MilestoneLine], milestones: Sequence[int], *, title: str, reference: str
) -> MilestonesInfo:
    """What the figure shows; rows without any value are left out."""
    return MilestonesInfo(
        title=title,
        reference=reference,
        milestones=tuple(milestones),
        lines=tuple(line for line in lines if any(line.values)),
    )


def milestones_figure(info: MilestonesInfo) -> go.Figure:
    """A line per row; the reference is the line at 0, below is better."""
    subtitle = (
        f"NE in percent of {info.reference}'s at the same number of training examples: mean over seeds; "
        "bars are intervals."
    )
    traces = [_trace(line, info.milestones, index) for index, line in enumerate(info.lines)]
    figure = drawing(traces, title=info.title, subtitle=subtitle, height=HEIGHT)
    figure.add_hline(0, line={"color": GREY, "width": 1.5}, annotation_text=info.reference, layer="below")
    figure.update_xaxes(title_text="training examples seen", tickformat="~s", rangemode="tozero")
    figure.update_yaxes(title_text=f"NE against {info.reference}", ticksuffix=" %")
    figure.update_layout(legend={"orientation": "v", "x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"})
    return figure


def _trace(line: MilestoneLine, milestones: Sequence[int], index: int) -> go.Scatter:
    points = [
        (examples, value)
        for examples, value in zip(milestones, line.values, strict=True)
        if value is not None
    ]
    color = COLORS[index % len(COLORS)]
    return go.Scatter(
        x=[examples for examples, _ in points],
        y=[mean for _, (mean, _) in points],
        error_y={"type": "data", "array": [half or 0.0 for _, (_, half) in points], "thickness": 1},
        mode="lines+markers",
        name=text(line.name),
        line={"color": color, "width": 2, "dash": DASHES[index // len(COLORS) % len(DASHES)]},
        marker={"color": color, "size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)]},
    )
