"""NE by period of a model that goes on learning, beside the same model as it was when that began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, GREY, VERMILION, drawing, empty, text

HEIGHT = 460
TITLE = "NE by period, each scored before it is trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodPoint:
    """One period."""

    name: str
    """The time at which it begins, or its number."""
    examples: int
    online: float
    """NE of the model that had been trained on all periods before."""
    frozen: float
    """NE of the model as it was at the beginning."""
    ne_floor: float | None = None
    """Lowest NE that any model can reach, where it is known."""


def periods_figure(points: Sequence[PeriodPoint]) -> go.Figure:
    """The figure: a line for each model, and one for the floor where it is known."""
    if not points:
        return empty("No period has been trained on.", title=TITLE)
    floors = [point.ne_floor for point in points]
    traces = [
        _line("as it was", points, [point.frozen for point in points], VERMILION, "dash", "square"),
        _line("online", points, [point.online for point in points], BLUE, "solid", "circle"),
    ]
    if any(floor is not None for floor in floors):
        traces.append(_line("lowest possible", points, floors, GREY, "dot", "line-ew"))
    subtitle = "Lower is better; 1 is a constant prediction. Both models score rows that neither has seen."
    figure = drawing(traces, title=TITLE, subtitle=subtitle, height=HEIGHT)
    figure.update_xaxes(title_text="period", type="category")
    figure.update_yaxes(title_text="NE")
    return figure


def _line(
    name: str, points: Sequence[PeriodPoint], y: Sequence[float | None], color: str, dash: str, symbol: str
) -> go.Scatter:
    hover = [
        ""
        if value is None
        else text(f"{point.name}, {name}", f"NE {value:.5f}", f"{point.examples:,} examples")
        for point, value in zip(points, y, strict=True)
    ]
    return go.Scatter(
        x=[point.name for point in points],
        y=list(y),
        mode="lines+markers",
        name=name,
        line={"color": color, "width": 2, "dash": dash},
        marker={"color": color, "size": 7, "symbol": symbol},
        hovertext=hover,
        hoverinfo="text",
    )
