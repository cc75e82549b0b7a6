"""Measured throughput of the study's own trainings against depth, by memory technique: the form of the paper's
Figure 6, of which `dhen-search plan --sweep` draws the predictions (`dashboards.figures.sweep`)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import plotly.graph_objects as go

from dashboards.figures.style import INK, drawing, empty, legend_below, text
from dashboards.figures.techniques import Look, looks, study_techniques
from dashboards.names import trial_name
from dashboards.units import known, si
from trials.record import TrialRecord
from trials.study_record import StudyRecord

HEIGHT = 460
TITLE = "Measured throughput against depth"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPoint:
    """One training."""

    trial: int
    name: str
    technique: str
    depth: int
    examples_per_second: float
    flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthLine:
    """One technique."""

    technique: str
    points: tuple[DepthPoint, ...]
    """Trainings in order of depth and number."""

    @property
    def medians(self) -> tuple[tuple[int, float], ...]:
        """Depths and the median throughput at each."""
        by_depth: dict[int, list[float]] = {}
        for point in self.points:
            by_depth.setdefault(point.depth, []).append(point.examples_per_second)
        return tuple((depth, median(values)) for depth, values in sorted(by_depth.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthInfo:
    """What the figure shows."""

    lines: tuple[DepthLine, ...]
    """A line for each technique that was executed, in the order of the ladder."""
    techniques: tuple[str, ...]
    """All techniques of the study, in the order of the ladder."""

    @property
    def depths(self) -> tuple[int, ...]:
        """All depths, ascending."""
        return tuple(sorted({point.depth for line in self.lines for point in line.points}))


def depth_info(record: StudyRecord) -> DepthInfo:
    """What the figure shows: networks of layers that trained here, with the technique that they were held by."""
    points = [point for trial in record.trials if (point := _point(trial)) is not None]
    techniques = study_techniques(record)
    lines = [
        DepthLine(
            technique=technique,
            points=tuple(
                sorted(
                    (point for point in points if point.technique == technique),
                    key=lambda point: (point.depth, point.trial),
                )
            ),
        )
        for technique in techniques
        if any(point.technique == technique for point in points)
    ]
    return DepthInfo(lines=tuple(lines), techniques=techniques)


def depth_figure(info: DepthInfo) -> go.Figure:
    """A line per technique through the medians at each depth, and every training as a point."""
    if not info.lines:
        reason = "Shown as soon as a network of layers has trained whose throughput was measured."
        return empty(reason, title=TITLE)
    found = looks(info.techniques)
    subtitle = (
        "Examples per second in training, evaluation excluded: points are trainings, lines their medians at each "
        "depth, by the memory technique that was executed. Networks of one depth differ in their modules too."
    )
    traces = [trace for line in info.lines for trace in _traces(line, found[line.technique])]
    figure = legend_below(drawing(traces, title=_title(info), subtitle=subtitle, height=HEIGHT))
    figure.update_xaxes(title_text="layers", tickvals=list(info.depths))
    figure.update_yaxes(title_text="examples per second", rangemode="tozero", tickformat="~s")
    return figure


def _point(trial: TrialRecord) -> DepthPoint | None:
    depth, speed = len(trial.job.model.get("layers") or ()), trial.result.measured.examples_per_second
    last = trial.attempts[-1] if trial.attempts else None
    if trial.shared or not depth or speed is None or not known(speed) or last is None:
        return None
    return DepthPoint(
        trial=trial.number,
        name=trial_name(trial),
        technique=last.unsized_strategy,
        depth=depth,
        examples_per_second=speed,
        flops=trial.job.flops,
    )


def _traces(line: DepthLine, look: Look) -> list[go.Scatter]:
    medians = go.Scatter(
        x=[depth for depth, _ in line.medians],
        y=[value for _, value in line.medians],
        mode="lines",
        name=text(line.technique),
        legendgroup=line.technique,
        showlegend=False,
        line={"color": look.color, "dash": look.dash, "width": 2},
        hoverinfo="skip",
    )
    points = go.Scatter(
        x=[point.depth for point in line.points],
        y=[point.examples_per_second for point in line.points],
        mode="markers",
        name=text(line.technique),
        legendgroup=line.technique,
        customdata=[point.trial for point in line.points],
        marker={
            "color": look.color,
            "symbol": look.symbol,
            "size": 10,
            "line": {"color": INK, "width": 0.8},
        },
        hovertext=[
            text(
                f"trial {point.trial}, {line.technique}",
                point.name,
                f"{point.depth} layers, {si(point.examples_per_second)} examples per second",
                f"{si(point.flops)} FLOPs" if point.flops is not None else "",
            )
            for point in line.points
        ],
        hoverinfo="text",
    )
    return [medians, points]


def _title(info: DepthInfo) -> str:
    """How much throughput falls from the shallowest to the deepest, with the technique that covers most depths."""
    widest = max(info.lines, key=lambda line: len(line.medians))
    if len(widest.medians) < 2:
        return TITLE
    (first, before), *_, (last, after) = widest.medians
    return f"With {widest.technique}, {last} layers train at {after / before:.2f}x the speed of {first}"
