"""Averages against their members: what averaging brings, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, GREY, INK, VERMILION, drawing, empty, legend_below, text
from dashboards.names import trial_name
from dashboards.rows import baseline_ne, relative_percent
from dashboards.units import decimals, known, percent, ratio, si
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord

TITLE = "What averages bring over their members"
MOST = 8
"""Largest number of averages that are drawn: those on the front and the winners come first."""
ROW_HEIGHT, MARGINS = 46, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPoint:
    """A network of an average."""

    number: int
    retraining: bool
    name: str
    ne: float
    relative_percent: float | None
    """NE on validation relative to the baseline."""
    flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragePoint:
    """An average and its members."""

    number: int
    ne: float
    relative_percent: float | None
    flops: float | None
    members: tuple[MemberPoint, ...]
    """Members with an NE, the best first."""
    on_front: bool

    @property
    def gain_percent(self) -> float:
        """NE relative to that of the best member; negative is better."""
        return 100.0 * (self.ne / self.members[0].ne - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragesInfo:
    """What the figure shows."""

    averages: tuple[AveragePoint, ...]
    """In order of FLOPs."""
    left_out: int
    """Number of further averages, which are not on the front."""
    baseline: bool
    """Whether there is a baseline that NE is relative to."""


def averages_info(record: StudyRecord) -> AveragesInfo:
    """What the figure shows: averages with an NE, those on the front and the winners first."""
    winners = {winner.trial for winner in record.choice.winners} if record.choice else set()
    chosen = {*record.front, *winners}
    base = baseline_ne(record)
    points = [point for trial in record.averages if (point := _average(trial, record, base)) is not None]
    ordered = sorted(points, key=lambda point: point.number not in chosen)
    shown = sorted(ordered[:MOST], key=lambda point: point.flops or 0.0)
    return AveragesInfo(averages=tuple(shown), left_out=len(points) - len(shown), baseline=base is not None)


def averages_figure(info: AveragesInfo) -> go.Figure:
    """A row per average: its members as circles, the average as a triangle."""
    if not info.averages:
        return empty("Shown as soon as the study has made an average of networks.", title=TITLE)
    subtitle = (
        "NE on validation of each average (triangle) and of the networks that it is the mean of "
        "(circles); left is "
        "better. What each member brings is told by `dhen-search ablate` of the average."
    )
    if info.left_out:
        subtitle += f" {info.left_out} more averages are not on the front."
    height = MARGINS + ROW_HEIGHT * len(info.averages)
    figure = drawing(_traces(info), title=_title(info), subtitle=subtitle, height=height)
    labels = [_label(point) for point in info.averages]
    figure.update_yaxes(
        categoryorder="array", categoryarray=labels, automargin=True, range=[len(labels) - 0.5, -0.5]
    )
    if info.baseline:
        figure.update_xaxes(title_text="NE against the baseline (left is better)", ticksuffix=" %")
        line = {"color": VERMILION, "width": 1, "dash": "dot"}
        figure.add_vline(0, line=line, annotation_text="baseline", layer="below")
    else:
        figure.update_xaxes(title_text="NE on validation (left is better)")
    return legend_below(figure)


def _average(trial: TrialRecord, record: StudyRecord, base: float | None) -> AveragePoint | None:
    ne = _ne(trial)
    members = [
        MemberPoint(
            number=member.number,
            retraining=member.kind is TrialKind.RETRAINING,
            name=trial_name(member),
            ne=value,
            relative_percent=relative_percent(value, base),
            flops=member.job.flops,
        )
        for member in record.networks(trial)
        if (value := _ne(member)) is not None
    ]
    if ne is None or not members:
        return None
    return AveragePoint(
        number=trial.number,
        ne=ne,
        relative_percent=relative_percent(ne, base),
        flops=trial.job.flops,
        members=tuple(sorted(members, key=lambda member: member.ne)),
        on_front=trial.number in record.front,
    )


def _ne(trial: TrialRecord) -> float | None:
    quality = trial.result.validation
    return quality.ne if quality is not None and known(quality.ne) else None


def _label(point: AveragePoint) -> str:
    return f"trial {point.number}: {len(point.members)} networks, {si(point.flops)} FLOPs"


def _x(point: AveragePoint | MemberPoint) -> float:
    return point.ne if point.relative_percent is None else point.relative_percent


def _traces(info: AveragesInfo) -> list[go.Scatter]:
    pairs = [(point, member) for point in info.averages for member in point.members]
    spans: list[float | None] = []
    rows: list[str | None] = []
    for point in info.averages:
        xs = [_x(point), *(_x(member) for member in point.members)]
        spans += [min(xs), max(xs), None]
        rows += [_label(point), _label(point), None]
    line = go.Scatter(
        x=spans,
        y=rows,
        mode="lines",
        line={"color": GREY, "width": 1},
        hoverinfo="skip",
        showlegend=False,
    )
    members = go.Scatter(
        x=[_x(member) for _, member in pairs],
        y=[_label(point) for point, _ in pairs],
        mode="markers+text",
        name="members",
        text=[str(member.number) for _, member in pairs],
        textposition="top center",
        customdata=[None if member.retraining else member.number for _, member in pairs],
        marker={"color": GREY, "symbol": "circle", "size": 10, "line": {"color": INK, "width": 0.8}},
        hovertext=[
            text(
                f"{'retraining' if member.retraining else 'trial'} {member.number}, a member of trial "
                f"{point.number}",
                member.name,
                f"NE {decimals(member.ne, 5)} ({percent(member.relative_percent)} to the baseline)",
                f"{si(member.flops)} FLOPs",
            )
            for point, member in pairs
        ],
        hoverinfo="text",
    )
    averages = go.Scatter(
        x=[_x(point) for point in info.averages],
        y=[_label(point) for point in info.averages],
        mode="markers",
        name="average",
        customdata=[point.number for point in info.averages],
        marker={"color": BLUE, "symbol": "triangle-up", "size": 15, "line": {"color": INK, "width": 0.8}},
        hovertext=[
            text(
                f"trial {point.number}, the average" + (": on the front" if point.on_front else ""),
                f"NE {decimals(point.ne, 5)} ({percent(point.relative_percent)} to the baseline)",
                f"{percent(point.gain_percent)} to its best member",
                f"{si(point.flops)} FLOPs",
            )
            for point in info.averages
        ],
        hoverinfo="text",
    )
    return [line, members, averages]


def _title(info: AveragesInfo) -> str:
    best = min(info.averages, key=lambda point: point.ne)
    first = best.members[0]
    times = f" at {ratio(best.flops / first.flops)} its FLOPs" if best.flops and first.flops else ""
    return f"The best average has {percent(best.gain_percent)} NE to its best member, trial {first.number},{times}"
