"""NE in the course of training: candidates relative to the baseline, a table of the paper's by milestone, and a
model that goes on learning by period; and throughput against the depth of networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREY,
    INK,
    LOOKS,
    NAMES,
    PALE_BLUE,
    PALE_GREY,
    VERMILION,
    drawing,
    empty,
    frame,
    legend_below,
    looks,
    study_techniques,
    text,
)
from dashboards.names import byte_size, known, percent, si, trial_name
from dashboards.rows import TrialRow, find, trial_rows
from trials.planner.estimates import PricedStrategy
from trials.records.study_record import StudyRecord, relative_ne_curve
from trials.records.trial_record import TrialRecord

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


# Throughput against depth by memory technique: measured by the study's own trainings, and, beside memory,
# predicted for a sweep over depths (`dhen-search plan --sweep`, the paper's Figure 6).

GIB = 2**30


def depth_figure(record: StudyRecord) -> go.Figure:
    """Measured throughput: every training of a network of layers as a point, and a line per technique through the
    medians at each depth."""
    title = "Measured throughput against depth"
    by_technique: dict[str, list[tuple[int, float, TrialRecord]]] = {}
    for trial in record.trials:
        depth, speed = len(trial.job.model.get("layers") or ()), trial.result.measured.examples_per_second
        if not trial.shared and depth and speed is not None and known(speed) and trial.attempts:
            technique = trial.attempts[-1].unsized_strategy
            by_technique.setdefault(technique, []).append((depth, speed, trial))
    if not by_technique:
        reason = "Shown as soon as a network of layers has trained whose throughput was measured."
        return empty(reason, title=title)
    traces, widest, covered = [], "", dict[int, float]()
    for technique, look in looks(study_techniques(record)).items():
        points = sorted(by_technique.get(technique, ()), key=lambda point: (point[0], point[2].number))
        if not points:
            continue
        medians = {
            depth: median(speed for other, speed, _ in points if other == depth) for depth, _, _ in points
        }
        if len(medians) > len(covered):
            widest, covered = technique, medians
        name = {"name": text(technique), "legendgroup": technique}
        line = {"color": look.color, "dash": look.dash, "width": 2}
        marker = {
            "color": look.color,
            "symbol": look.symbol,
            "size": 10,
            "line": {"color": INK, "width": 0.8},
        }
        traces += [
            go.Scatter(
                x=list(medians),
                y=list(medians.values()),
                mode="lines",
                showlegend=False,
                line=line,
                hoverinfo="skip",
                **name,
            ),
            go.Scatter(
                x=[depth for depth, _, _ in points],
                y=[speed for _, speed, _ in points],
                mode="markers",
                customdata=[trial.number for _, _, trial in points],
                marker=marker,
                hovertext=[
                    text(
                        f"trial {trial.number}, {technique}",
                        trial_name(trial),
                        f"{depth} layers, {si(speed)} examples per second",
                        f"{si(trial.job.flops)} FLOPs" if trial.job.flops is not None else "",
                    )
                    for depth, speed, trial in points
                ],
                hoverinfo="text",
                **name,
            ),
        ]
    if len(covered) > 1:
        (first, before), *_, (last, after) = covered.items()
        title = f"With {widest}, {last} layers train at {after / before:.2f}x the speed of {first}"
    subtitle = (
        "Examples per second in training, evaluation excluded: points are trainings, lines their medians at each "
        "depth, by the memory technique that was executed. Networks of one depth differ in their modules too."
    )
    figure = legend_below(drawing(traces, title=title, subtitle=subtitle, height=460))
    depths = sorted({depth for points in by_technique.values() for depth, _, _ in points})
    figure.update_xaxes(title_text="layers", tickvals=depths)
    figure.update_yaxes(title_text="examples per second", rangemode="tozero", tickformat="~s")
    return figure


Sweep = Mapping[int, Sequence[PricedStrategy]]
"""The priced ladder of each depth."""


def deepest_that_fit(by_depth: Sweep) -> dict[str, int | None]:
    """The greatest depth that fits with each way to hold the dense state, without other techniques; None if none
    does. The ways are in the order of the ladder."""
    return {
        dense: max((depth for depth, priced in points if priced.fits), default=None)
        for dense, points in _lines(by_depth).items()
    }


def sweep_figure(by_depth: Sweep, *, cluster: str, hbm: int, batch_size: int) -> go.Figure:
    """Predicted throughput of each way to hold the dense state above, as far as the memory suffices; memory below,
    with the limit of a rank. `batch_size` is that of a step over all ranks."""
    lines = _lines(by_depth)
    if not lines:
        return empty("No depth was priced.", title="Throughput and memory against depth")
    above: list[go.Scatter] = []
    below: list[go.Scatter] = []
    for dense, points in lines.items():
        look = LOOKS[dense]
        fitting = [(depth, priced) for depth, priced in points if priced.fits]
        speeds = [batch_size / priced.seconds_per_batch for _, priced in fitting]
        gib = [priced.memory.total / GIB for _, priced in points]
        for traces, shown, values, axis, style in (
            (above, fitting, speeds, "y", {}),
            (below, points, gib, "y2", {"showlegend": False}),
        ):
            trace = go.Scatter(
                x=[depth for depth, _ in shown],
                y=values,
                yaxis=axis,
                mode="lines+markers",
                name=NAMES[dense],
                legendgroup=dense,
                line={"color": look.color, "width": 2, "dash": look.dash},
                marker={"color": look.color, "size": 7, "symbol": look.symbol},
                hovertext=[
                    text(
                        f"{NAMES[dense]}, {depth} layers",
                        f"{si(batch_size / priced.seconds_per_batch)} examples per second",
                        byte_size(priced.memory.total) + ("" if priced.fits else ": does not fit"),
                    )
                    for depth, priced in shown
                ],
                hoverinfo="text",
                **style,
            )
            traces.append(trace)
    ends = deepest_that_fit(by_depth)
    last = max(depth for points in lines.values() for depth, _ in points)
    title = f"All fit up to {last} layers"
    if any(depth != last for depth in ends.values()):
        limits = [f"{NAMES[dense]} {'nowhere' if depth is None else depth}" for dense, depth in ends.items()]
        title = f"Layers that fit: {', '.join(limits)}"
    subtitle = (
        f"Predicted for {cluster}, a rank having {byte_size(hbm)}; "
        "throughput only if the memory suffices (above), memory at the peak (below)."
    )
    figure = drawing([*above, *below], title=title, subtitle=subtitle, height=720)
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
    figure.add_hline(hbm / GIB, line=line, yref="y2", annotation_text="memory of a rank")
    return figure


def _lines(by_depth: Sweep) -> dict[str, list[tuple[int, PricedStrategy]]]:
    """Depths and prices of each way to hold the dense state without other techniques, in the ladder's order."""
    lines: dict[str, list[tuple[int, PricedStrategy]]] = {dense: [] for dense in LOOKS}
    for depth, strategies in sorted(by_depth.items()):
        for priced in strategies:
            if not set(priced.strategy.techniques) - {priced.strategy.dense}:
                lines[priced.strategy.dense].append((depth, priced))
    return {dense: points for dense, points in lines.items() if points}
