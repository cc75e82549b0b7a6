"""The Pareto fronts of two studies in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, VERMILION, drawing, empty, text
from dashboards.rows import find, trial_rows
from dashboards.units import decimals, known, percent, si
from trials.record import TrialRecord
from trials.study_record import StudyRecord

HEIGHT = 470
TITLE = "Both fronts"
COLOURS = (BLUE, VERMILION)
SYMBOLS = ("circle", "diamond")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOfStudy:
    """The front of one of the two studies."""

    study: str
    points: tuple[tuple[int, float, float, str], ...]
    """Number, FLOPs, NE or NE relative to the study's own baseline in percent, and what is said of each trial, by
    FLOPs."""
    baseline: float | None
    """The baseline on the same axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoFrontsInfo:
    """What the figure shows."""

    relative: bool
    """Whether NE is in percent of each study's own baseline, as it is where NE itself cannot be compared."""
    fronts: tuple[FrontOfStudy, FrontOfStudy]


def two_fronts_info(records: Sequence[StudyRecord], names: Sequence[str], *, relative: bool) -> TwoFrontsInfo:
    """Returns both fronts, on the axis of NE or of NE relative to each study's own baseline."""
    first, second = (
        _front(record, name, relative=relative) for record, name in zip(records, names, strict=True)
    )
    return TwoFrontsInfo(relative=relative, fronts=(first, second))


def two_fronts_figure(info: TwoFrontsInfo) -> go.Figure:
    """Draws the fronts, in a colour and with a symbol each."""
    if not any(front.points for front in info.fronts):
        return empty("Shown as soon as one of the studies has a front.", title=TITLE)
    what = "NE against its own baseline" if info.relative else "NE on validation"
    traces = [
        go.Scatter(
            x=[flops for _, flops, _, _ in front.points],
            y=[ne for _, _, ne, _ in front.points],
            hovertext=[said for _, _, _, said in front.points],
            hoverinfo="text",
            mode="lines+markers",
            name=text(front.study),
            line={"color": colour, "width": 2, "shape": "hv"},
            marker={"color": colour, "size": 9, "symbol": symbol},
        )
        for front, colour, symbol in zip(info.fronts, COLOURS, SYMBOLS, strict=True)
    ]
    subtitle = f"{what}, by FLOPs per example; lower left is better. Dotted: the baseline of each."
    figure = drawing(traces, title=TITLE, subtitle=subtitle, height=HEIGHT)
    for front, colour in zip(info.fronts, COLOURS, strict=True):
        if front.baseline is not None:
            figure.add_hline(front.baseline, line={"color": colour, "width": 1, "dash": "dot"}, layer="below")
    figure.update_xaxes(type="log", title_text="forward FLOPs per example", tickformat=".2~s", dtick="D2")
    figure.update_yaxes(title_text=what, ticksuffix=" %" if info.relative else "")
    return figure


def _front(record: StudyRecord, name: str, *, relative: bool) -> FrontOfStudy:
    trials = [trial for trial in record.trials if trial.number in record.front]
    points = []
    for row in trial_rows(record, trials):
        ne, flops = row.relative_percent if relative else row.ne, row.trial.job.flops
        if ne is not None and flops and known(flops):
            against = (
                f" ({percent(row.relative_percent)} to its baseline)"
                if row.relative_percent is not None
                else ""
            )
            said = text(
                f"{name}, trial {row.trial.number}",
                row.name,
                f"NE {decimals(row.ne, 5)}{against}",
                f"{si(flops)} FLOPs",
            )
            points.append((row.trial.number, flops, ne, said))
    return FrontOfStudy(
        study=name,
        points=tuple(sorted(points, key=lambda point: point[1])),
        baseline=_baseline(find(record, record.baseline), relative=relative),
    )


def _baseline(trial: TrialRecord | None, *, relative: bool) -> float | None:
    if trial is None or trial.result.validation is None or not known(trial.result.validation.ne):
        return None
    return 0.0 if relative else trial.result.validation.ne
