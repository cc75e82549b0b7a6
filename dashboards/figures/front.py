"""NE on validation against FLOPs, and the Pareto front between them.

Points and their drawing also serve a front against another price than FLOPs (`dashboards.figures.table_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.frame import Frame, frame
from dashboards.figures.style import BLUE, GREY, VERMILION, drawing, empty, text
from dashboards.rows import TrialRow, trial_rows
from dashboards.units import decimals, known, milliseconds, percent, ratio, si
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord

HEIGHT = 470
NEAR_FLOOR = 1.0
"""The floor is drawn where it is no farther below the lowest NE than this many heights of the frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What NE is drawn against."""

    of: Callable[[TrialRecord], float | None]
    """A trial's price; None where it is not known."""
    words: Callable[[float], str]
    """A price in words: `1.23 M FLOPs`."""


FLOPS = Price(of=lambda trial: trial.job.flops, words=lambda flops: f"{si(flops)} FLOPs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One trial in the plane."""

    row: TrialRow
    ne: float
    price: float
    """FLOPs, or what else NE is drawn against."""

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.row.trial.number

    @property
    def stopped(self) -> bool:
        """Whether the trial ended before its budget was used up: its NE could have become lower."""
        return self.row.trial.result.outcome is not Outcome.COMPLETED

    @property
    def average(self) -> bool:
        """Whether the trial is a mean of networks, in place of one."""
        return self.row.trial.kind is TrialKind.AVERAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontInfo:
    """What the figure shows."""

    price: Price
    candidates: tuple[FrontPoint, ...]
    """Finished candidates and averages that have an NE and a price, in order of number."""
    front: tuple[FrontPoint, ...]
    """Points on the front, in order of price."""
    networks_front: tuple[FrontPoint, ...]
    """The front without averages, in order of FLOPs; empty where no average is on the front."""
    baseline: FrontPoint | None
    best: FrontPoint | None
    knee: FrontPoint | None
    floor: float | None
    """Lowest reachable NE on validation."""
    frame: Frame | None
    """Range of the NE axis; None where there is no point."""
    floor_in_frame: bool


def front_info(record: StudyRecord) -> FrontInfo:
    """What the figure shows; which trials are on the front is read from the record, not worked out here."""
    return info_against(FLOPS, record, record.front, networks=record.networks_front, knee=record.knee)


def info_against(
    price: Price,
    record: StudyRecord,
    on_front: Sequence[int],
    *,
    networks: Sequence[int] = (),
    knee: int | None = None,
) -> FrontInfo:
    """What a figure of NE against a price shows.

    Args:
        price: what NE is drawn against.
        record: the study's record.
        on_front: numbers of the trials on the front.
        networks: numbers of the networks on the front without averages, where it is drawn too.
        knee: number of the trial where the front bends most, where it is marked.
    """
    drawn = (_point(row, price) for row in trial_rows(record))
    points = {point.number: point for point in drawn if point is not None}
    numbers = {trial.number for trial in (*record.field, *record.averages)}
    candidates = tuple(point for number, point in points.items() if number in numbers)
    front = [points[number] for number in on_front if number in points]
    alone = [points[number] for number in networks if number in points]
    baseline = points.get(record.baseline) if record.baseline is not None else None
    floor = (record.log.ne_floor or {}).get("validation")
    frame_without_floor = _frame(candidates, front, baseline, None)
    near = frame_without_floor is not None and floor is not None and _near(floor, frame_without_floor)
    return FrontInfo(
        price=price,
        candidates=candidates,
        front=tuple(sorted(front, key=lambda point: point.price)),
        networks_front=tuple(alone) if any(point.average for point in front) else (),
        baseline=baseline,
        best=points.get(record.best) if record.best is not None else None,
        knee=points.get(knee) if knee is not None else None,
        floor=floor,
        frame=_frame(candidates, front, baseline, floor if near else None),
        floor_in_frame=near,
    )


def front_figure(info: FrontInfo) -> go.Figure:
    """The figure, with FLOPs on a logarithmic axis; lower left is better."""
    if info.frame is None:
        reason = "Shown as soon as a trial has an NE on validation."
        return empty(reason, title="NE against FLOPs")
    figure = drawn_against(
        info, title=_title(info), subtitle="NE on validation against FLOPs per example; lower left is better."
    )
    figure.update_xaxes(title_text="forward FLOPs per example", tickformat=".2~s", dtick="D2")
    return figure


def drawn_against(info: FrontInfo, *, title: str, subtitle: str) -> go.Figure:
    """The figure of points that there are, with their price on a logarithmic axis."""
    assert info.frame is not None
    traces = [_field(info), *_networks_line(info), _front_line(info), *_marked(info)]
    if info.frame.above:
        subtitle += f" {info.frame.above} above this frame; a double click shows all."
    figure = drawing(traces, title=title, subtitle=subtitle, height=HEIGHT)
    figure.update_xaxes(type="log", minor_showgrid=False)
    figure.update_yaxes(title_text="NE on validation", range=[info.frame.low, info.frame.high])
    if info.baseline:
        figure.add_hline(
            info.baseline.ne, line={"color": VERMILION, "width": 1, "dash": "dot"}, layer="below"
        )
    _draw_floor(figure, info)
    return figure


def _point(row: TrialRow, price: Price) -> FrontPoint | None:
    """The trial's point; None where a coordinate is missing, and while the trial still trains."""
    ne, value = row.ne, price.of(row.trial)
    if row.trial.result.outcome is Outcome.RUNNING or ne is None or not value or not known(value):
        return None
    return FrontPoint(row=row, ne=ne, price=value)


def _frame(
    candidates: tuple[FrontPoint, ...],
    front: list[FrontPoint],
    baseline: FrontPoint | None,
    floor: float | None,
) -> Frame | None:
    always = [point.ne for point in front] + ([baseline.ne] if baseline else [])
    always += [floor] if floor is not None and (always or candidates) else []
    return frame([point.ne for point in candidates], always) if candidates or always else None


def _near(floor: float, frame_without_floor: Frame) -> bool:
    return frame_without_floor.low - floor <= NEAR_FLOOR * (
        frame_without_floor.high - frame_without_floor.low
    )


def _hover(point: FrontPoint, info: FrontInfo) -> str:
    row, baseline = point.row, info.baseline
    flops, serving_ms = row.trial.job.flops, row.trial.plan.serving_ms
    times = ratio(point.price / baseline.price) if baseline else ""
    relative = (
        f" ({percent(row.relative_percent)} to the baseline)" if row.relative_percent is not None else ""
    )
    return text(
        f"trial {point.number}" + (f": {', '.join(row.marks)}" if row.marks else ""),
        row.name,
        f"NE {decimals(point.ne, 5)}{relative}",
        "stopped before its budget was used up" if point.stopped else "",
        info.price.words(point.price) + (f" ({times} the baseline's)" if times else ""),
        FLOPS.words(flops) if info.price is not FLOPS and flops is not None else "",
        f"{milliseconds(serving_ms)} forward" if serving_ms is not None else "",
    )


def _scatter(points: tuple[FrontPoint, ...], info: FrontInfo, **style: object) -> go.Scatter:
    return go.Scatter(
        x=[point.price for point in points],
        y=[point.ne for point in points],
        hovertext=[_hover(point, info) for point in points],
        hoverinfo="text",
        **style,
    )


def _field(info: FrontInfo) -> go.Scatter:
    on_front = {point.number for point in info.front}
    others = tuple(point for point in info.candidates if point.number not in on_front)
    symbols = ["circle-open" if point.stopped else _symbol(point) for point in others]
    marker = {"color": GREY, "size": 8, "symbol": symbols}
    name = "candidates (open: stopped early)" if "circle-open" in symbols else "candidates"
    return _scatter(others, info, mode="markers", name=name, marker=marker)


def _front_line(info: FrontInfo) -> go.Scatter:
    """A step line: between two points of the front the cheaper one is the best that such a price buys."""
    return _scatter(
        info.front,
        info,
        mode="lines+markers",
        name="Pareto front (triangles: averages)"
        if any(point.average for point in info.front)
        else "Pareto front",
        line={"color": BLUE, "width": 2, "shape": "hv"},
        marker={"color": BLUE, "size": 9, "symbol": [_symbol(point) for point in info.front]},
    )


def _networks_line(info: FrontInfo) -> list[go.Scatter]:
    """The front without averages, so that what averages gain, and at which price, is the gap between two lines."""
    if not info.networks_front:
        return []
    line = {"color": BLUE, "width": 1.5, "dash": "dot", "shape": "hv"}
    name = "front of single networks"
    return [_scatter(info.networks_front, info, mode="lines", name=name, line=line)]


def _symbol(point: FrontPoint) -> str:
    return "triangle-up" if point.average else "circle"


def _marked(info: FrontInfo) -> list[go.Scatter]:
    """Baseline, knee and best: a shape of their own and a label beside it."""
    same = info.best is not None and info.best == info.knee
    chosen = [
        (info.baseline, "baseline", "square", VERMILION, "top right"),
        (None if same else info.knee, "knee", "diamond", BLUE, "bottom left"),
        (info.best, "best and knee" if same else "best", "star", BLUE, "bottom center"),
    ]
    return [
        _scatter(
            (point,),
            info,
            mode="markers+text",
            text=[label],
            textposition=position,
            textfont={"color": colour},
            marker={"color": colour, "symbol": symbol, "size": 15},
            cliponaxis=False,
            showlegend=False,
        )
        for point, label, symbol, colour, position in chosen
        if point is not None
    ]


def _title(info: FrontInfo) -> str:
    best, baseline = info.best, info.baseline
    relative = best.row.relative_percent if best is not None else None
    if best is None or relative is None or baseline is None:
        return "NE against FLOPs"
    if best.number == baseline.number:
        return "No candidate is better than the baseline beyond the noise of choosing"
    where = "below" if relative < 0 else "above"
    times = ratio(best.price / baseline.price)
    return f"The best candidate is {abs(relative):.2f} % {where} the baseline at {times} its FLOPs"


def _draw_floor(figure: go.Figure, info: FrontInfo) -> None:
    if info.floor is None:
        return
    label = f"floor {decimals(info.floor, 5)}"
    if info.floor_in_frame:
        line = {"color": GREY, "width": 1, "dash": "dash"}
        position = "bottom left"
        figure.add_hline(
            info.floor, line=line, annotation_text=label, annotation_position=position, layer="below"
        )
        return
    where = {"x": 0, "xref": "paper", "xanchor": "left", "y": 0, "yref": "paper", "yanchor": "bottom"}
    figure.add_annotation(text=f"{label}, below this frame", showarrow=False, **where)
