"""Predicted against measured: the peak memory of a rank and the time of a step, a point per attempt.

`dashboards.accuracy` has the errors as a table; a point is here where that table counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10

import plotly.graph_objects as go

from dashboards.accuracy import ALL, accuracy, share, signed
from dashboards.figures.style import GREY, INK, drawing, empty, legend_below, text
from dashboards.figures.techniques import Look, looks, study_techniques
from dashboards.units import byte_size, known, milliseconds
from trials.record import Attempt, Outcome, TrialRecord
from trials.study_record import StudyRecord

PANEL_HEIGHT, MARGINS = 330, 200
TITLE = "How far plans are from measurements"
MIB, MS = 2.0**20, 1e3
ROOM = 1.15
"""Room beyond the lowest and the highest value, as a factor on the logarithmic axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionPoint:
    """One attempt."""

    trial: int
    technique: str
    predicted: float
    """Bytes of memory, or seconds of a step."""
    measured: float
    """The same; of an attempt that ran out of memory the bytes that it would have held at that moment."""
    ran_out: bool

    @property
    def error_percent(self) -> float:
        """Measured over predicted less one, in percent."""
        return 100.0 * (self.measured / self.predicted - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionsInfo:
    """What the figure shows."""

    memory: tuple[PredictionPoint, ...]
    step: tuple[PredictionPoint, ...]
    memory_off: float | None
    """Median error of the peaks without its sign, in percent; None where none was counted."""
    step_off: float | None
    techniques: tuple[str, ...]
    """All techniques of the study, in the order of the ladder."""


def predictions_info(record: StudyRecord) -> PredictionsInfo:
    """What the figure shows: attempts that ran on what they were planned for."""
    attempts = [(trial, attempt) for trial in record.trials for attempt in trial.attempts]
    of_all = next((row for row in accuracy(record) if row.technique == ALL), None)
    return PredictionsInfo(
        memory=tuple(_points((each, attempt, *_peaks(attempt)) for each, attempt in attempts)),
        step=tuple(
            _points(
                (each, attempt, attempt.predicted_step_seconds, attempt.measured_step_seconds)
                for each, attempt in attempts
            )
        ),
        memory_off=of_all.peak.median if of_all else None,
        step_off=of_all.step.median if of_all else None,
        techniques=study_techniques(record),
    )


def predictions_figure(info: PredictionsInfo) -> go.Figure:
    """Two panels on logarithmic axes, memory above and time below; above the line it took more."""
    if not info.memory and not info.step:
        reason = "Shown as soon as an attempt has ended that ran on the cluster that it was planned for."
        return empty(reason, title=TITLE)
    used = {point.technique for point in (*info.memory, *info.step)}
    found = {name: look for name, look in looks(info.techniques).items() if name in used}
    panels = [
        panel
        for panel in (
            ("MiB of memory per rank", info.memory, MIB),
            ("milliseconds per step", info.step, MS),
        )
        if panel[1]
    ]
    traces = [
        trace
        for index, (_, points, _) in enumerate(panels)
        for trace in _panel(points, found, "" if index == 0 else "2", memory=points is info.memory)
    ]
    subtitle = (
        "A point per training attempt, on the dashed line where both are equal, above it where more was needed "
        "than predicted; colour and shape: memory technique."
    )
    if any(point.ran_out for point in info.memory):
        subtitle += " Open: ran out of memory, shown with what it would have held."
    figure = legend_below(
        drawing(traces, title=_title(info), subtitle=subtitle, height=MARGINS + PANEL_HEIGHT * len(panels))
    )
    for index, (unit, points, _) in enumerate(panels):
        _lay_out(figure, index, len(panels), unit, points, memory=points is info.memory)
    return figure


def _peaks(attempt: Attempt) -> tuple[float | None, float | None]:
    """Predicted and measured peak; of an attempt that ran out of memory, what it would have held."""
    if attempt.outcome is Outcome.OUT_OF_MEMORY:
        return attempt.predicted_bytes, attempt.needed_bytes
    return attempt.predicted_bytes, attempt.measured_bytes


def _points(
    values: Iterable[tuple[TrialRecord, Attempt, float | None, float | None]],
) -> Iterable[PredictionPoint]:
    for trial, attempt, predicted, measured in values:
        if predicted and measured and known(predicted) and known(measured):
            yield PredictionPoint(
                trial=trial.number,
                technique=attempt.unsized_strategy,
                predicted=float(predicted),
                measured=float(measured),
                ran_out=attempt.outcome is Outcome.OUT_OF_MEMORY,
            )


def _panel(
    points: Sequence[PredictionPoint], found: dict[str, Look], axis: str, *, memory: bool
) -> list[go.Scatter]:
    scale = 1 / MIB if memory else MS
    low, high = (end * scale for end in _range(points))
    identity = go.Scatter(
        x=[low, high],
        y=[low, high],
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        mode="lines",
        line={"color": GREY, "width": 1.5, "dash": "dash"},
        name="as predicted",
        hoverinfo="skip",
        showlegend=not axis,
    )
    traces = [identity]
    for technique, look in found.items():
        own = sorted(
            (point for point in points if point.technique == technique), key=lambda point: point.ran_out
        )
        trace = go.Scatter(
            x=[point.predicted * scale for point in own],
            y=[point.measured * scale for point in own],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="markers",
            name=text(technique),
            legendgroup=technique,
            showlegend=not axis,
            customdata=[point.trial for point in own],
            marker={
                "color": look.color,
                "size": 11,
                "symbol": [f"{look.symbol}-open" if point.ran_out else look.symbol for point in own],
                "line": {"color": INK, "width": 0.8},
            },
            hovertext=[_hover(point, memory=memory) for point in own],
            hoverinfo="text",
        )
        traces.append(trace)
    return traces


def _hover(point: PredictionPoint, *, memory: bool) -> str:
    predicted, measured = (
        byte_size(value) if memory else milliseconds(MS * value)
        for value in (point.predicted, point.measured)
    )
    needed = "would have held" if point.ran_out else "measured"
    return text(
        f"trial {point.trial}, {point.technique}" + (": ran out of memory" if point.ran_out else ""),
        f"predicted {predicted}, {needed} {measured} ({signed(point.error_percent)})",
    )


def _range(points: Sequence[PredictionPoint]) -> tuple[float, float]:
    values = [value for point in points for value in (point.predicted, point.measured)]
    return min(values) / ROOM, max(values) * ROOM


def _lay_out(
    figure: go.Figure, index: int, count: int, unit: str, points: Sequence[PredictionPoint], *, memory: bool
) -> None:
    suffix = "" if index == 0 else "2"
    scale = 1 / MIB if memory else MS
    ends = [log10(end * scale) for end in _range(points)]
    domain = [0.0, 1.0] if count == 1 else [[0.58, 1.0], [0.0, 0.42]][index]
    style = {
        "type": "log",
        "range": ends,
        "dtick": "D2",
        "tickformat": "~g",
        "gridcolor": figure.layout.xaxis.gridcolor,
    }
    x = style | {"anchor": f"y{suffix}", "title": {"text": f"predicted {unit}"}}
    y = style | {
        "domain": domain,
        "anchor": f"x{suffix}",
        "title": {"text": f"measured {unit}"},
        "zeroline": False,
    }
    figure.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})


def _title(info: PredictionsInfo) -> str:
    peaks = sum(not point.ran_out for point in info.memory)
    clauses = []
    if info.memory_off is not None:
        clauses.append(f"{share(info.memory_off)} in memory ({peaks} attempts)")
    if info.step_off is not None:
        clauses.append(f"{share(info.step_off)} in step time ({len(info.step)} attempts)")
    return f"Predictions are off by {' and '.join(clauses)}, in the median" if clauses else TITLE
