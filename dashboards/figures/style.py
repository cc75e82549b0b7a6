"""How figures look: few colours that stay apart for colour-blind readers, on light paper and on dark.

The colours are Okabe and Ito's (https://jfly.uni-koeln.de/color/): blue and vermilion for what the study found and
for the baseline, raised a little in lightness so that they hold on dark paper, and the others for categories; all
else is grey. Roles and categories differ in shape too, never in colour alone. The paper is left transparent: the
page decides it, and the colour of text and grid.

A memory technique's name is a strategy's (`trials.records.strategy`), such as `hsdp+cpu_offload`. Its colour is
that of its way to hold the dense state, so that it is the same in every figure of every study.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import quantiles
from typing import NamedTuple

import plotly.graph_objects as go

from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialKind

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
"""Colour of text and lines if no page sets them: readable on white and on near-black."""
GRID = "rgba(128,128,128,0.18)"
HEIGHT_EMPTY = 120
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MARGIN = 0.06
"""Room left at either end, as a share of the range."""


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
    """The figure with its legend at its lower edge, if many entries have room."""
    below = {"x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"}
    return figure.update_layout(legend=below | {"itemsizing": "constant"})


def empty(reason: str, *, title: str) -> go.Figure:
    """A figure that has nothing to draw yet; its subtitle says why."""
    figure = drawing((), title=title, subtitle=reason, height=HEIGHT_EMPTY)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


class Frame(NamedTuple):
    """A range, and how many of the values lie above it."""

    low: float
    high: float
    above: int


def frame(values: Sequence[float], always: Sequence[float] = ()) -> Frame:
    """The range from the lowest value up to Tukey's upper fence (third quartile + 1.5 interquartile ranges).

    `always` are values that are inside whatever the fence says. Lower is better here: nothing is ever cut
    off below. At least one value is needed.
    """
    inside = sorted(values)
    if len(inside) >= 4:
        first, _, third = quantiles(inside, n=4, method="inclusive")
        fence = third + 1.5 * (third - first)
        inside = [value for value in inside if value <= fence]
    shown = [*inside, *always]
    low, high = min(shown), max(shown)
    margin = MARGIN * (high - low) or abs(high) * 0.01 or 1.0
    top = high + margin
    return Frame(low=low - margin, high=top, above=sum(value > top for value in values))


class TechniqueStyle(NamedTuple):
    """Colour and symbol of one technique, the dash of its lines and the pattern of its bars."""

    color: str
    symbol: str
    dash: str
    pattern: str = ""


LOOKS = {
    "dp": TechniqueStyle(GREY, "circle", "solid"),
    "zero1": TechniqueStyle(SKY, "square", "dot"),
    "zero2": TechniqueStyle(GREEN, "triangle-down", "dash"),
    "zero_offload": TechniqueStyle(YELLOW, "x", "dashdot"),
    "shard_grad_op": TechniqueStyle(ORANGE, "triangle-right", "longdash"),
    "hsdp": TechniqueStyle(PURPLE, "diamond", "solid"),
    "fsdp": TechniqueStyle(BLUE, "cross", "longdashdot"),
}
"""Looks of the ways to hold the dense state by themselves, in the order of the ladder."""
NAMES = {
    "dp": "DP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero_offload": "ZeRO-Offload",
    "shard_grad_op": "shard_grad_op",
    "hsdp": "HSDP",
    "fsdp": "FSDP",
}
"""What the ways to hold the dense state are called in papers."""
COMBINED = (
    "pentagon",
    "hourglass",
    "hexagon2",
    "bowtie",
    "star-diamond",
    "octagon",
    "star-square",
    "hexagram",
)
"""Symbols of techniques that join several, in turn."""
DASHES = ("dot", "dash", "dashdot", "longdash")
PATTERNS = ("/", "\\", "-", "|", "+", ".")


def study_techniques(record: StudyRecord) -> tuple[str, ...]:
    """All techniques that trials of a study were planned for or trained with, in the order of the ladder: figures
    take looks of all of them, so that each looks the same in every figure of a study."""
    networks = [trial for trial in record.trials if trial.kind is not TrialKind.AVERAGE]
    planned = (trial.plan.unsized_technique for trial in networks)
    trained = (
        attempt.unsized_strategy for trial in (*networks, *record.retrainings) for attempt in trial.attempts
    )
    at_work = (trial.result.technique for trial in networks if not trial.attempts)
    return in_order(name for name in (*planned, *trained, *at_work) if name is not None)


def dense_of(technique: str) -> str:
    """The way in which a technique holds the dense state: `hsdp` of `hsdp+cpu_offload`."""
    first = technique.partition("+")[0]
    return first if first in LOOKS else "dp"


def in_order(techniques: Iterable[str]) -> tuple[str, ...]:
    """Different techniques in the order of the ladder: those that join fewer come first."""
    ways = tuple(LOOKS)

    def rank(name: str) -> tuple[int, int, str]:
        # plain DP joins no technique, nor is how gradients of micro-batches are sent one
        joined = set(name.split("+")) - {"dp", "no_sync"}
        return len(joined), ways.index(dense_of(name)), name

    return tuple(sorted(set(techniques), key=rank))


def looks(techniques: Iterable[str]) -> dict[str, TechniqueStyle]:
    """The look of each technique, in the order of the ladder; no two have the same symbol, up to fifteen."""
    found: dict[str, TechniqueStyle] = {}
    combined = 0
    for name in in_order(techniques):
        look = LOOKS[dense_of(name)]
        if name not in LOOKS:
            look = look._replace(
                symbol=COMBINED[combined % len(COMBINED)],
                dash=DASHES[combined % len(DASHES)],
                pattern=PATTERNS[combined % len(PATTERNS)],
            )
            combined += 1
        found[name] = look
    return found
