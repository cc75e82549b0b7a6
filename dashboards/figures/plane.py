"""NE on validation against what it costs, FLOPs or bytes of embedding tables, and the Pareto front between them.

Colour and shape are by memory technique, size by memory; winners that were retrained have intervals. Which trials
are on the front is read from the record, not worked out here. Each marker has its trial's number as `customdata`,
by which a page knows what was clicked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    drawing,
    empty,
    frame,
    legend_below,
    looks,
    study_techniques,
    text,
)
from dashboards.names import byte_size, decimals, known, milliseconds, percent, ratio, si
from dashboards.rows import TrialRow, table_bytes_differ, trial_rows
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

HEIGHT = 520
NEAR_FLOOR = 1.0
"""The floor is drawn if it is no farther below the lowest NE than this many heights of the frame."""
SIZE, SMALLEST, LARGEST = 9.0, 7.0, 20.0
"""Diameters of markers in pixels: if all take about the same memory, for the least, and for the most."""
DIFFER = 1.1
"""Ratio of the largest to the smallest memory from which markers differ in size."""
FAINT = 0.6
"""Opacity of what is not on the front."""
MOST_TICKS = 8
"""Largest number of ticks: their labels, such as `512 KiB`, have room beside each other on a page."""
WIDE = 8.0
"""Ratio of the largest to the smallest tables from which ticks are at powers of two."""
NOTHING = "Shown as soon as a trial has an NE on validation."


class FrontAxis(NamedTuple):
    """What NE is drawn against."""

    of: Callable[[TrialRecord], float | None]
    """A trial's price; None if it is not known."""
    words: Callable[[float], str]
    """A price in words: `1.23 M FLOPs`."""


class Point(NamedTuple):
    """One trial in the plane."""

    row: TrialRow
    ne: float
    price: float

    @property
    def trial(self) -> TrialRecord:
        """The trial itself."""
        return self.row.trial

    @property
    def stopped(self) -> bool:
        """Whether the trial ended before its budget was used up: its NE could have become lower."""
        return self.trial.result.outcome is not Outcome.COMPLETED

    @property
    def technique(self) -> str | None:
        """The planned memory technique; None for an average, which is not trained, and if none fits."""
        return None if self.trial.kind is TrialKind.AVERAGE else self.trial.plan.unsized_technique

    @property
    def memory_bytes(self) -> int | None:
        """Predicted peak of a rank; None if nothing was planned."""
        return None if self.trial.kind is TrialKind.AVERAGE else self.trial.plan.peak_bytes


Points = dict[int | None, Point]
FLOPS = FrontAxis(of=lambda trial: trial.job.flops, words=lambda flops: f"{si(flops)} FLOPs")
TABLE_BYTES = FrontAxis(
    of=lambda trial: trial.job.table_bytes, words=lambda count: f"{byte_size(count)} of embedding tables"
)


def front_figure(record: StudyRecord) -> go.Figure:
    """NE against FLOPs on a logarithmic axis; lower left is better."""
    points = _points(record, FLOPS)
    best, baseline = points.get(record.best), points.get(record.baseline)
    title = "NE against FLOPs"
    if best is not None and baseline is not None and best.row.relative_percent is not None:
        relative = best.row.relative_percent
        side, times = "below" if relative < 0 else "above", ratio(best.price / baseline.price)
        title = f"The best candidate is {abs(relative):.2f} % {side} the baseline at {times} its FLOPs"
        if best is baseline:
            title = "No candidate is better than the baseline beyond the noise of choosing"
    figure = _against(
        FLOPS,
        points,
        record,
        front=record.front,
        networks_front=record.networks_front,
        knee=points.get(record.knee),
        title=title,
        subtitle="NE on validation against FLOPs per example; lower left is better.",
    )
    if figure.data:
        figure.update_xaxes(title_text="forward FLOPs per example", tickformat=".2~s", dtick="D2")
    return figure


def table_bytes_figure(record: StudyRecord) -> go.Figure | None:
    """NE against bytes of embedding tables on a logarithmic axis; None if candidates do not differ in them."""
    if not table_bytes_differ(record):
        return None
    points = _points(record, TABLE_BYTES)
    front = [points[number] for number in record.table_bytes_front if number in points]
    title = "NE against bytes of embedding tables"
    if front:
        smallest, *_, lowest = sorted([front[0], *front], key=lambda point: point.price)
        more = decimals(relative_ne_percent(smallest.ne, lowest.ne), 2)
        title = f"Tables of {byte_size(smallest.price)} in place of {byte_size(lowest.price)} raise NE by {more} %"
        if smallest is lowest:
            title = f"The lowest NE needs no larger tables than {byte_size(lowest.price)}"
    figure = _against(
        TABLE_BYTES,
        points,
        record,
        front=record.table_bytes_front,
        title=title,
        subtitle="NE on validation against embedding tables as training stores them; lower left is better.",
    )
    if figure.data:
        drawn = [*_candidates(points, record), *filter(None, [points.get(record.baseline)])]
        prices = [point.price for point in drawn]
        low, high = min(prices), max(prices)
        if high < WIDE * low:  # sizes at even distances from smallest to largest
            count = 5 if high > low else 1
            ticks = [low * (high / low) ** (index / max(1, count - 1)) for index in range(count)]
        else:
            first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
            step = math.ceil((last - first + 1) / MOST_TICKS)
            ticks = [2.0**power for power in range(first, last + 1, step)]
        labels = [byte_size(tick).replace(".0 ", " ") for tick in ticks]
        figure.update_xaxes(title_text="bytes of embedding tables", tickvals=ticks, ticktext=labels)
    return figure


def _points(record: StudyRecord, price: FrontAxis) -> Points:
    """Points of all trials that have both coordinates and no longer train, by number."""
    priced = ((row, row.ne, price.of(row.trial)) for row in trial_rows(record))
    return {
        row.trial.number: Point(row=row, ne=ne, price=value)
        for row, ne, value in priced
        if row.trial.result.outcome is not Outcome.RUNNING and ne is not None and value and known(value)
    }


def _candidates(points: Points, record: StudyRecord) -> list[Point]:
    """Points of the networks and averages among which the front is chosen."""
    numbers = {trial.number for trial in (*record.field, *record.averages)}
    return [point for number, point in points.items() if number in numbers]


def _against(
    price: FrontAxis,
    points: Points,
    record: StudyRecord,
    *,
    front: Sequence[int],
    networks_front: Sequence[int] = (),
    knee: Point | None = None,
    title: str,
    subtitle: str,
) -> go.Figure:
    """The figure of NE against a price; empty if there is nothing to draw.

    Args:
        price: what NE is drawn against.
        points: trials in the plane.
        record: the study's record.
        front: numbers of the trials on the front.
        networks_front: numbers of the networks on the front without averages, if it may be drawn too.
        knee: the point at which the front bends most, if it is marked.
        title: what is seen.
        subtitle: how to read it.
    """
    candidates = _candidates(points, record)
    on_front = sorted((points[each] for each in front if each in points), key=lambda point: point.price)
    baseline, best = points.get(record.baseline), points.get(record.best)
    compared = [each for each in record.comparisons if each.trial in points] if baseline else []
    always = [point.ne for point in on_front] + ([baseline.ne] if baseline else [])
    if baseline:
        ends = (end for each in compared for end in (each.low_percent, each.high_percent))
        always += [baseline.ne * (1 + end / 100) for end in ends]
    if not candidates and not always:
        return empty(NOTHING, title=title)
    values = [point.ne for point in candidates]
    seen = frame(values, always)
    floor = (record.log.ne_floor or {}).get("validation")
    floor_in_frame = floor is not None and seen.low - floor <= NEAR_FLOOR * (seen.high - seen.low)
    if floor is not None and floor_in_frame:
        seen = frame(values, [*always, floor])
    sizes = [point.memory_bytes for point in candidates if point.memory_bytes]
    sizes_differ = bool(sizes) and max(sizes) > DIFFER * min(sizes)
    techniques = looks(study_techniques(record))

    def scatter(shown: Sequence[Point], **style: object) -> go.Scatter:
        return go.Scatter(
            x=[point.price for point in shown],
            y=[point.ne for point in shown],
            customdata=[point.trial.number for point in shown],
            hovertext=[_hover(point, price, baseline) for point in shown],
            hoverinfo="text",
            **style,
        )

    def field(shown: Sequence[Point], name: str, color: str, symbol: str) -> go.Scatter:
        outlined = {point.trial.number for point in on_front}
        # area grows with memory, so that twice the ink is twice the bytes, down to the smallest that is seen
        diameters = [
            max(SMALLEST, LARGEST * (point.memory_bytes / max(sizes)) ** 0.5)
            if sizes_differ and point.memory_bytes
            else SIZE
            for point in shown
        ]
        if any(point.stopped for point in shown):
            name += " (open: stopped early)"
        widths = [1.5 if p.trial.number in outlined or p.stopped else 0.5 for p in shown]
        marker = {
            "color": color,
            "symbol": [f"{symbol}-open" if point.stopped else symbol for point in shown],
            "size": diameters,
            "opacity": [1.0 if point.trial.number in outlined else FAINT for point in shown],
            "line": {"color": INK, "width": widths},
        }
        return scatter(shown, mode="markers", name=text(name), marker=marker)

    traces = []
    if any(point.trial.kind is TrialKind.AVERAGE for point in on_front):
        # what averages gain, and at which price, is the gap between both lines
        alone = [points[number] for number in networks_front if number in points]
        dotted = {"color": BLUE, "width": 1.5, "dash": "dot", "shape": "hv"}
        if alone:
            traces.append(scatter(alone, mode="lines", name="front of single networks", line=dotted))
    # a step line: between two points of the front the cheaper one is the best that such a price buys
    step_line = {"color": BLUE, "width": 2, "shape": "hv"}
    traces.append(scatter(on_front, mode="lines", name="Pareto front", line=step_line))
    for technique, look in techniques.items():
        # the legend has the symbol of the first one
        own = sorted((p for p in candidates if p.technique == technique), key=lambda point: point.stopped)
        name = technique if len(techniques) > 1 else f"candidates ({technique})"
        traces += [field(own, name, look.color, look.symbol)] if own else []
    averages = [point for point in candidates if point.trial.kind is TrialKind.AVERAGE]
    traces += [field(averages, "averages", BLUE, "triangle-up")] if averages else []
    if baseline and compared:
        middles = [baseline.ne * (1 + each.difference_percent / 100) for each in compared]
        lows = [baseline.ne * (1 + each.low_percent / 100) for each in compared]
        highs = [baseline.ne * (1 + each.high_percent / 100) for each in compared]
        traces.append(
            go.Scatter(
                x=[points[each.trial].price for each in compared],
                y=middles,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [high - middle for high, middle in zip(highs, middles, strict=True)],
                    "arrayminus": [middle - low for low, middle in zip(lows, middles, strict=True)],
                    "color": INK,
                    "thickness": 1.5,
                    "width": 6,
                },
                mode="markers",
                marker={"symbol": "line-ew", "size": 12, "color": INK, "line": {"color": INK, "width": 2}},
                name="winners retrained, 95 % interval",
                customdata=[each.trial for each in compared],
                hovertext=[
                    text(
                        f"trial {each.trial}, retrained: is it better than the baseline? {each.better.value}",
                        f"95 % interval on test, on this axis: {decimals(low, 5)} to {decimals(high, 5)}",
                    )
                    for each, low, high in zip(compared, lows, highs, strict=True)
                ],
                hoverinfo="text",
            )
        )
    same = best is not None and best is knee
    # baseline, knee and best have a shape of their own and a label beside it
    for point, label, symbol, color, position in (
        (baseline, "baseline", "square-open", VERMILION, "top right"),
        (None if same else knee, "knee", "diamond-open", BLUE, "bottom left"),
        (best, "best and knee" if same else "best", "star-open", BLUE, "bottom center"),
    ):
        if point is not None:
            marked = scatter(
                [point],
                mode="markers+text",
                text=[label],
                textposition=position,
                textfont={"color": color},
                marker={"color": color, "symbol": symbol, "size": 22, "line": {"width": 2}},
                cliponaxis=False,
                showlegend=False,
            )
            traces.append(marked)

    if len(techniques) > 1:
        subtitle += " Colour and shape: memory technique."
    if sizes_differ:
        smallest, largest = byte_size(min(sizes)), byte_size(max(sizes))
        subtitle += f" Area: predicted peak memory of a rank, {smallest} to {largest}."
    if compared:
        subtitle += " Bars: where retrainings place winners on test, "
        subtitle += "as 95 % intervals of the difference to the baseline."
    if seen.above:
        subtitle += f" {seen.above} above this frame; a double click shows all."
    figure = legend_below(drawing(traces, title=title, subtitle=subtitle, height=HEIGHT))
    figure.update_xaxes(type="log", minor_showgrid=False)
    figure.update_yaxes(title_text="NE on validation", range=[seen.low, seen.high])
    if baseline:
        figure.add_hline(baseline.ne, line={"color": VERMILION, "width": 1, "dash": "dot"}, layer="below")
    label = f"floor {decimals(floor, 5)}"
    if floor_in_frame:
        dashed = {"color": GREY, "width": 1, "dash": "dash"}
        figure.add_hline(
            floor, line=dashed, annotation_text=label, annotation_position="bottom left", layer="below"
        )
    elif floor is not None:
        corner = {"x": 1, "xref": "paper", "xanchor": "right", "y": 0, "yref": "paper", "yanchor": "bottom"}
        figure.add_annotation(text=f"{label}, below this frame", showarrow=False, **corner)
    return figure


def _hover(point: Point, price: FrontAxis, baseline: Point | None) -> str:
    row, trial = point.row, point.trial
    relative = (
        f" ({percent(row.relative_percent)} to the baseline)" if row.relative_percent is not None else ""
    )
    times = f" ({ratio(point.price / baseline.price)} the baseline's)" if baseline else ""
    memory = ""
    if point.technique is not None:  # `hsdp+cpu_offload, 5.1 MiB per rank predicted (trained here with dp)`
        takes = f", {byte_size(point.memory_bytes)} per rank predicted" if point.memory_bytes else ""
        executed = trial.result.technique
        elsewise = executed is not None and executed != trial.plan.technique
        memory = f"{point.technique}{takes}" + (f" (trained here with {executed})" if elsewise else "")
    flops, serving_ms = trial.job.flops, trial.plan.serving_ms
    return text(
        row.heading,
        row.name,
        f"NE {decimals(point.ne, 5)}{relative}",
        "stopped before its budget was used up" if point.stopped else "",
        price.words(point.price) + times,
        FLOPS.words(flops) if price is not FLOPS and flops is not None else "",
        f"{milliseconds(serving_ms)} forward" if serving_ms is not None else "",
        memory,
    )
