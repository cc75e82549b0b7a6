"""Best NE and hypervolume against time: what the study had found by when, and in which stage.

The hypervolume is the area that the front covers below the baseline's NE, over the logarithm of FLOPs up to the
dearest network's: it grows where a network is better, and where one as good is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.course.clock import STAGES, Run, runs_of
from dashboards.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, drawing, empty, text
from dashboards.names import trial_name
from dashboards.rows import baseline_ne
from dashboards.units import decimals, duration, known, percent
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import StudyRecord, relative_ne_percent

HEIGHT = 520
TITLE = "Best NE and hypervolume against time"
TINTS = dict(zip(STAGES, (VERMILION, BLUE, GREEN, ORANGE, PURPLE, SKY, GREY), strict=True))
WIDE = 0.05
"""Share of the time that a stage takes at least for its name to have room."""
MOST_BANDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GainStep:
    """The study's state once a trial has ended."""

    trial: int
    name: str
    seconds: float
    """Seconds on the study's clock."""
    best_ne: float
    hypervolume: float
    """In percent of NE times powers of ten of FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainInfo:
    """What the figure shows."""

    steps: tuple[GainStep, ...]
    """A step for each completed network or average, in order of time."""
    baseline: float | None
    """NE of the tuned baseline."""
    stages: tuple[tuple[str, float, float], ...]
    """Stages with start and end in seconds, in order of time."""
    left_out_seconds: float


def gain_info(record: StudyRecord) -> GainInfo:
    """What the figure shows: candidates and averages that completed, when they ended."""
    found = runs_of(record, taken_over=True)
    done = sorted((run for run in found.runs if _counts(run.trial)), key=lambda run: run.end)
    return GainInfo(
        steps=tuple(_steps(done, baseline_ne(record))),
        baseline=baseline_ne(record),
        stages=found.stretches(),
        left_out_seconds=found.left_out_seconds,
    )


def hypervolume(points: Iterable[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The area between points (cost, value) and a reference that is worse in both; lower is better."""
    area, lowest = 0.0, reference[1]
    ordered = sorted(point for point in points if point[0] < reference[0] and point[1] < reference[1])
    for cost, value in ordered:
        if value < lowest:
            area += (reference[0] - cost) * (lowest - value)
            lowest = value
    return area


def gain_figure(info: GainInfo) -> go.Figure:
    """Best NE above, hypervolume in percent of the last one below, over bands for the stages."""
    if not info.steps:
        return empty("Shown as soon as a candidate has completed.", title=TITLE)
    subtitle = (
        "Above: lowest NE on validation so far. Below: hypervolume, the area that the front covers under the "
        "baseline's NE over the logarithm of FLOPs, in percent of what it is at the end. Bands: "
        "stages of the study."
    )
    if info.left_out_seconds:
        subtitle += f" Pauses of {duration(info.left_out_seconds)} in all are left out."
    figure = drawing([_best(info), _volume(info)], title=_title(info), subtitle=subtitle, height=HEIGHT)
    grid = figure.layout.yaxis.gridcolor
    figure.update_layout(
        showlegend=False,
        yaxis={"domain": [0.5, 0.94], "title": {"text": "lowest NE"}},
        yaxis2={
            "domain": [0.0, 0.42],
            "title": {"text": "hypervolume"},
            "ticksuffix": " %",
            "range": [-4, 106],
            "gridcolor": grid,
            "zeroline": False,
        },
    )
    end = max([stop for _, _, stop in info.stages] + [info.steps[-1].seconds]) / 60
    figure.update_xaxes(title_text="minutes", anchor="y2", range=[0, end * 1.01 or 1])
    if info.baseline is not None:
        line = {"color": VERMILION, "width": 1, "dash": "dot"}
        figure.add_hline(info.baseline, line=line, annotation_text="baseline", layer="below")
    _draw_stages(figure, info, end)
    return figure


def _counts(trial: TrialRecord) -> bool:
    quality, flops = trial.result.validation, trial.job.flops
    if trial.kind in (TrialKind.BASELINE, TrialKind.RETRAINING) or quality is None:
        return False
    return trial.result.outcome is Outcome.COMPLETED and known(quality.ne) and flops is not None and flops > 0


def _place(trial: TrialRecord) -> tuple[float, float]:
    """Powers of ten of FLOPs, and NE."""
    assert trial.result.validation is not None
    assert trial.job.flops is not None
    return math.log10(trial.job.flops), trial.result.validation.ne


def _steps(done: Sequence[Run], baseline: float | None) -> list[GainStep]:
    places = [_place(run.trial) for run in done]
    if not places:
        return []
    top = baseline if baseline is not None else max(ne for _, ne in places)
    dearest = max(cost for cost, _ in places) + 1e-9
    values = [(cost, relative_ne_percent(ne, top)) for cost, ne in places]
    steps, best, front = [], math.inf, list[tuple[float, float]]()
    for run, (_, ne), value in zip(done, places, values, strict=True):
        best = min(best, ne)
        # what others beat in both stays out, so that a study of thousands of trials is quick to draw
        if not any(other[0] <= value[0] and other[1] <= value[1] for other in front):
            front = [other for other in front if other[0] < value[0] or other[1] < value[1]] + [value]
        steps.append(
            GainStep(
                trial=run.trial.number,
                name=trial_name(run.trial),
                seconds=run.end,
                best_ne=best,
                hypervolume=hypervolume(front, (dearest, 0.0)),
            )
        )
    return steps


def _best(info: GainInfo) -> go.Scatter:
    return _step_line(info, [step.best_ne for step in info.steps], "y", "lowest NE", BLUE)


def _volume(info: GainInfo) -> go.Scatter:
    last = info.steps[-1].hypervolume
    shares = [100 * step.hypervolume / last if last else 0.0 for step in info.steps]
    return _step_line(info, shares, "y2", "hypervolume", GREEN)


def _step_line(info: GainInfo, values: list[float], axis: str, name: str, color: str) -> go.Scatter:
    last = info.steps[-1].hypervolume
    shares = (100 * step.hypervolume / last if last else 0.0 for step in info.steps)
    hovers = [
        text(
            f"{duration(step.seconds)}: trial {step.trial} completed",
            step.name,
            f"lowest NE so far {decimals(step.best_ne, 5)}",
            f"hypervolume {decimals(share, 1)} % of the last",
        )
        for step, share in zip(info.steps, shares, strict=True)
    ]
    return go.Scatter(
        x=[step.seconds / 60 for step in info.steps],
        y=values,
        yaxis=axis,
        mode="lines+markers",
        name=name,
        line={"color": color, "width": 2, "shape": "hv"},
        marker={"color": color, "size": 5, "symbol": "circle" if axis == "y" else "square"},
        customdata=[step.trial for step in info.steps],
        hovertext=hovers,
        hoverinfo="text",
    )


def _draw_stages(figure: go.Figure, info: GainInfo, minutes: float) -> None:
    """Bands, each named at its top where it is wide enough, the first of its stage in any case."""
    named = set[str]()
    for stage, start, end in info.stages[:MOST_BANDS]:
        figure.add_shape(
            type="rect",
            x0=start / 60,
            x1=end / 60,
            y0=0,
            y1=1,
            xref="x",
            yref="paper",
            fillcolor=TINTS[stage],
            opacity=0.09,
            line_width=0,
            layer="below",
        )
        if (end - start) / 60 >= WIDE * minutes or stage not in named:
            figure.add_annotation(
                text=stage,
                x=min(start / 60, 0.9 * minutes),
                y=1 if len(named) % 2 == 0 else 0.96,
                xref="x",
                yref="paper",
                xanchor="left",
                yanchor="top",
                showarrow=False,
                font={"size": 12},
            )
            named.add(stage)


def _title(info: GainInfo) -> str:
    """When the lowest NE was reached, and what it is."""
    last = info.steps[-1]
    first = next(step for step in info.steps if step.best_ne == last.best_ne)
    at = f"after {duration(first.seconds)} of {duration(max(stop for _, _, stop in info.stages))}"
    if info.baseline is None:
        return f"The lowest NE, {decimals(last.best_ne, 5)}, was reached {at}"
    return f"The lowest NE, {percent(relative_ne_percent(last.best_ne, info.baseline))} to the baseline, came {at}"
