"""Throughput against depth by memory technique: measured by the study's own trainings, and, beside memory,
predicted for a sweep over depths (`dhen-search plan --sweep`, the paper's Figure 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import plotly.graph_objects as go

from dashboards.figures.style import (
    GREY,
    INK,
    LOOKS,
    NAMES,
    drawing,
    empty,
    legend_below,
    looks,
    study_techniques,
    text,
)
from dashboards.names import byte_size, known, si, trial_name
from trials.planner.estimates import PricedStrategy
from trials.records.study_record import StudyRecord
from trials.records.trial_record import TrialRecord

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
        "throughput only where the memory suffices (above), memory at the peak (below)."
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
