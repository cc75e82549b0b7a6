"""Learning curves relative to the baseline at the same numbers of examples, as the paper's tables give NE."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.frame import Frame, frame
from dashboards.figures.style import BLUE, PALE_BLUE, PALE_GREY, VERMILION, drawing, empty, text
from dashboards.names import trial_name
from dashboards.rows import find, marks
from dashboards.units import known, percent, si
from trials.record import Curve, TrialRecord
from trials.study_record import StudyRecord, relative_ne_curve

HEIGHT = 430
TITLE = "Learning curves against the baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveLine:
    """One candidate's curve."""

    number: int
    name: str
    marks: tuple[str, ...]
    points: tuple[tuple[int, float], ...]
    """Pairs (training examples seen, NE relative to the baseline in percent), ascending in examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvesInfo:
    """What the figure shows."""

    lines: tuple[CurveLine, ...]
    """Candidates with at least one point in the baseline's range, in order of number."""
    baseline: str | None
    """The baseline's number and model in short; None where there is no baseline yet."""
    last_examples: int
    """Number of training examples at which the baseline's own curve ends."""
    frame: Frame | None
    """Range of the percent axis, fit to the second half of training, for early values would press the rest flat;
    None where there is no curve."""
    outside: bool
    """Whether a part of a curve lies outside the frame."""


def curves_info(record: StudyRecord) -> CurvesInfo:
    """What the figure shows; a trial with another trial's result is left out, for it would cover that curve."""
    baseline = find(record, record.baseline)
    baseline_curve = baseline.result.curve if baseline else Curve()
    trained = [trial for trial in record.field if trial.origin.reused_from is None]
    lines = tuple(line for trial in trained if (line := _line(trial, record, baseline_curve)).points)
    axis_frame = _frame(lines, baseline_curve.examples[-1] / 2) if lines else None
    values = [value for line in lines for _, value in line.points]
    return CurvesInfo(
        lines=lines,
        baseline=f"trial {baseline.number}, {trial_name(baseline)}" if baseline and baseline_curve else None,
        last_examples=baseline_curve.examples[-1] if baseline_curve else 0,
        frame=axis_frame,
        outside=axis_frame is not None
        and not all(axis_frame.low <= value <= axis_frame.high for value in values),
    )


def curves_figure(info: CurvesInfo) -> go.Figure:
    """The baseline is the line at 0; below is better. The field is grey, the front blue."""
    if info.baseline is None:
        return empty("Shown as soon as the baseline has been trained.", title=TITLE)
    if info.frame is None:
        return empty("Shown as soon as a candidate has been evaluated.", title=TITLE)
    subtitle = f"NE in percent of the baseline's ({info.baseline}) at the same number of training examples."
    if info.outside:
        subtitle += " The frame fits the second half of training; a double click shows all."
    front = tuple(line for line in info.lines if "front" in line.marks and not _named(line))
    others = tuple(line for line in info.lines if "front" not in line.marks and not _named(line))
    traces = [
        *_group(others, "candidates", color=PALE_GREY, width=1),
        *_group(front, "Pareto front", color=PALE_BLUE, width=1.5),
        *(_named_line(line) for line in info.lines if _named(line)),
    ]
    figure = drawing(traces, title=TITLE, subtitle=subtitle, height=HEIGHT)
    figure.add_hline(0, line={"color": VERMILION, "width": 1.5}, annotation_text="baseline", layer="below")
    figure.update_annotations(font={"color": VERMILION}, selector={"text": "baseline"})
    figure.update_xaxes(title_text="training examples seen", tickformat="~s", rangemode="tozero")
    figure.update_yaxes(
        title_text="NE against the baseline", ticksuffix=" %", range=[info.frame.low, info.frame.high]
    )
    return figure


def _frame(lines: tuple[CurveLine, ...], start: float) -> Frame:
    """A frame fit to all values from `start` examples on, and to the last ones of curves that end before."""
    late = [value for line in lines for examples, value in line.points if examples >= start]
    early_ends = [line.points[-1][1] for line in lines if line.points[-1][0] < start]
    return frame(late + early_ends, always=[0.0])


def _line(trial: TrialRecord, record: StudyRecord, baseline: Curve) -> CurveLine:
    pairs = relative_ne_curve(trial.result.curve, baseline)
    points = tuple(pair for pair in pairs if known(pair[1]))
    return CurveLine(number=trial.number, name=trial_name(trial), marks=marks(trial, record), points=points)


def _named(line: CurveLine) -> bool:
    """Whether the curve has a line and a label of its own, as best and knee have."""
    return "best" in line.marks or "knee" in line.marks


def _group(lines: tuple[CurveLine, ...], name: str, *, color: str, width: float) -> list[go.Scatter]:
    """Many curves as one trace with gaps: one legend entry, and quick to draw for hundreds."""
    if not lines:
        return []
    xs: list[int | None] = []
    ys: list[float | None] = []
    hovers: list[str] = []
    for line in lines:
        xs += [examples for examples, _ in line.points] + [None]
        ys += [value for _, value in line.points] + [None]
        hovers += [*_hovers(line), ""]
    style = {"color": color, "width": width}
    marker = {"size": 3, "color": color}
    return [
        go.Scatter(
            x=xs,
            y=ys,
            hovertext=hovers,
            hoverinfo="text",
            mode="lines+markers",
            name=name,
            line=style,
            marker=marker,
        )
    ]


def _named_line(line: CurveLine) -> go.Scatter:
    names = [mark for mark in ("best", "knee") if mark in line.marks]
    return go.Scatter(
        x=[examples for examples, _ in line.points],
        y=[value for _, value in line.points],
        hovertext=_hovers(line),
        hoverinfo="text",
        mode="lines+markers",
        name=f"{' and '.join(names)} (trial {line.number})",
        line={"color": BLUE, "width": 2.5, "dash": "solid" if "best" in names else "dash"},
        marker={"color": BLUE, "size": 7, "symbol": "star" if "best" in names else "diamond"},
    )


def _hovers(line: CurveLine) -> list[str]:
    about = f"trial {line.number}" + (f": {', '.join(line.marks)}" if line.marks else "")
    return [
        text(about, line.name, f"{percent(value)} at {si(examples)} examples")
        for examples, value in line.points
    ]
