"""How figures look: few colours that stay apart for colour-blind readers, on light paper and on dark.

The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/): blue and vermilion for what the study found and
for the baseline, raised a little in lightness so that they hold on dark paper, and the others for categories; all
else is grey. Roles and categories differ in shape too, never in colour alone. The paper is left transparent: the
page decides it, and the colour of text and grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go

BLUE = "#2a86c7"
"""Colour of what the study found: front, best, knee."""
PALE_BLUE = "rgba(42,134,199,0.5)"
VERMILION = "#e0662b"
"""Colour of the baseline."""
ORANGE, SKY, GREEN, YELLOW, PURPLE = "#e69f00", "#56b4e9", "#009e73", "#c2b000", "#cc79a7"
"""Colours of categories; yellow is darkened, so that it is seen on white."""
GREY = "#9aa0a8"
"""Colour of the field."""
PALE_GREY = "rgba(140,147,156,0.55)"
INK = "#6b7280"
"""Colour of text and lines where no page sets them: readable on white and on near-black."""
GRID = "rgba(128,128,128,0.18)"
HEIGHT_EMPTY = 120
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def drawing(traces: Iterable[go.BaseTraceType], *, title: str, subtitle: str, height: int) -> go.Figure:
    """A figure in the house style; the title says what is seen, the subtitle how to read it.

    Plotly reads a few HTML tags in text, so whatever comes from data is escaped here and in `text`.
    """
    # given whole: `update_layout` looks at each value many times, which is most of the time of a small figure
    layout = {
        "title": {
            "text": escape(title, quote=False),
            "subtitle": {"text": escape(subtitle, quote=False), "font": {"size": 13.5, "weight": "normal"}},
            "font": {"size": 19, "weight": "bold"},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 0.97,
            "yanchor": "top",
        },
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "height": height,
        "margin": {"l": 64, "r": 24, "t": 92, "b": 52},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 1,
            "xanchor": "right",
            "y": 1,
            "yanchor": "bottom",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
        "hoverlabel": {"font": {"family": FONT}, "align": "left"},
        "hovermode": "closest",
        "xaxis": {
            "gridcolor": GRID,
            "zeroline": False,
            "linecolor": GRID,
            "ticks": "outside",
            "tickcolor": GRID,
        },
        "yaxis": {"gridcolor": GRID, "zeroline": False},
    }
    return go.Figure(list(traces), layout=layout)


def text(*lines: str) -> str:
    """Lines of a label or a hover box, escaped."""
    return "<br>".join(escape(line, quote=False) for line in lines if line)


def legend_below(figure: go.Figure) -> go.Figure:
    """The figure with its legend at its lower edge, where many entries have room."""
    below = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    return figure.update_layout(legend=below | {"itemsizing": "constant"})


def empty(reason: str, *, title: str) -> go.Figure:
    """A figure that has nothing to draw yet; its subtitle says why."""
    figure = drawing((), title=title, subtitle=reason, height=HEIGHT_EMPTY)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure
