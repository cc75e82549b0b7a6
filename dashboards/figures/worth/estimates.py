"""Estimates with intervals, a row each, around a line at 0: how modules, parts, members and slices are drawn.

Everywhere here NE is lower, and so better, to the left of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.frame import frame
from dashboards.figures.style import BLUE, GREY, VERMILION, drawing, legend_below, text
from dashboards.units import percent, percent_range
from trials.analyses import Better

ROW_HEIGHT, MARGINS = 24, 210
"""Pixels of a row, and above and below all of them."""
MARGIN = 0.05
"""Room left at either end of the axis, as a share of the range."""
LOOKS = {
    Better.YES: ("circle", BLUE),
    Better.NO: ("square", VERMILION),
    Better.CANNOT_TELL: ("circle-open", GREY),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One row."""

    label: str
    percent: float
    """Change of NE in percent; negative is better."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval; None where there is none."""
    better: Better
    """Whether NE is lower, beyond doubt."""
    hover: tuple[str, ...] = ()
    """Further lines of the hover box."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; None where there is none."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def judged(low: float | None, high: float | None) -> Better:
    """Whether an interval lies on one side of 0."""
    if low is None or high is None:
        return Better.CANNOT_TELL
    return Better.YES if high < 0 else Better.NO if low > 0 else Better.CANNOT_TELL


def estimates_figure(
    rows: Sequence[Estimate],
    *,
    title: str,
    subtitle: str,
    axis: str,
    words: tuple[str, str, str],
    more: Sequence[go.Scatter] = (),
) -> go.Figure:
    """The figure.

    Args:
        rows: from top to bottom; labels are different.
        title: what is seen.
        subtitle: how to read it.
        axis: what the numbers are.
        words: the legend's names of rows that are better, worse, and undecided.
        more: further traces over the same rows.
    """
    names = dict(zip(LOOKS, words, strict=True))
    traces = [
        _trace([row for row in rows if row.better is verdict], names[verdict], *look)
        for verdict, look in LOOKS.items()
        if any(row.better is verdict for row in rows)
    ]
    ends, beyond = _range(rows)
    if beyond:
        subtitle += f" {beyond} of these intervals go beyond the frame; a double click shows all."
    height = MARGINS + ROW_HEIGHT * len(rows)
    figure = drawing([*traces, *more], title=title, subtitle=subtitle, height=height)
    figure.update_yaxes(
        autorange="reversed",
        categoryorder="array",
        categoryarray=[row.label for row in rows],
        automargin=True,
        tickmode="array",
        tickvals=[row.label for row in rows],
        ticktext=[text(row.label) for row in rows],
        range=[len(rows) - 0.5, -0.5],
    )
    figure.update_xaxes(title_text=axis, ticksuffix=" %", range=ends)
    figure.add_vline(0, line={"color": GREY, "width": 1.5}, layer="below")
    return legend_below(figure)


def interval_trace(
    rows: Sequence[Estimate], name: str, symbol: str, color: str, *, size: int = 9
) -> go.Scatter:
    """Points with their intervals, on the rows of the same labels."""
    return go.Scatter(
        x=[row.percent for row in rows],
        y=[row.label for row in rows],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.percent if row.high is not None else 0.0 for row in rows],
            "arrayminus": [row.percent - row.low if row.low is not None else 0.0 for row in rows],
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": size},
        hovertext=[_hover(row) for row in rows],
        hoverinfo="text",
    )


def _range(rows: Sequence[Estimate]) -> tuple[tuple[float, float], int]:
    """Ends of the axis, which a few wide intervals must not press flat, and how many intervals go beyond them."""
    found = [(row.percent, *row.interval) for row in rows if row.interval is not None]
    widths = [max(high - middle, middle - low) for middle, low, high in found]
    usual = frame(widths).high if widths else 0.0
    shown = [0.0, *(row.percent for row in rows)]
    for middle, low, high in found:
        shown += [max(low, middle - usual), min(high, middle + usual)]
    margin = MARGIN * (max(shown) - min(shown)) or 1.0
    first, last = min(shown) - margin, max(shown) + margin
    return (first, last), sum(low < first or high > last for _, low, high in found)


def _trace(rows: Sequence[Estimate], name: str, symbol: str, color: str) -> go.Scatter:
    return interval_trace(rows, name, symbol, color)


def _hover(row: Estimate) -> str:
    between = f" (95 % interval {percent_range(row.low, row.high)})" if row.low is not None else ""
    return text(row.label, f"{percent(row.percent)} NE{between}", *row.hover)
