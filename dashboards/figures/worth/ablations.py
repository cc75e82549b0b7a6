"""What the parts of winners bring: a network's modules and layers, an average's members (`dhen-search ablate`)."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import empty
from dashboards.figures.worth.estimates import Estimate, estimates_figure, judged
from dashboards.names import counted_from_one, trial_name
from dashboards.rows import find
from dashboards.units import decimals, percent, si
from trials.analyses import Ablation
from trials.study_record import StudyRecord

TITLE = "What the parts of winners bring"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedPart:
    """One part of one winner."""

    trial: int
    removed: str
    percent: float
    """Change of NE that the part brings, in percent: with it, against without it; negative is better."""
    low: float | None
    high: float | None
    flops: float
    """FLOPs of the rest."""
    flops_percent: float
    """FLOPs of the part, in percent of the whole's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedTrial:
    """One winner."""

    trial: int
    name: str
    seeds: int
    split: str
    parts: tuple[AblatedPart, ...]
    """Parts whose trainings completed, the most valuable first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationsInfo:
    """What the figure shows."""

    trials: tuple[AblatedTrial, ...]
    directory: str


def ablations_info(record: StudyRecord) -> AblationsInfo:
    """What the figure shows: all ablations that the study's ledger has."""
    return AblationsInfo(
        trials=tuple(_trial(ablation, record) for ablation in record.ablations), directory=record.directory
    )


def ablations_figure(info: AblationsInfo) -> go.Figure:
    """A row per part of each winner; left of 0 it lowers NE."""
    rows = [row for trial in info.trials for row in _rows(trial, several=len(info.trials) > 1)]
    if not rows:
        command = f"dhen-search ablate {info.directory}"
        reason = f"Shown once `{command}` has retrained a winner without each of its parts."
        return empty(reason, title=TITLE)
    told = "; ".join(
        f"trial {trial.trial}: {trial.name}, {trial.seeds} seeds, on {trial.split}" for trial in info.trials
    )
    subtitle = (
        "Each part is removed in turn and the rest is trained again; of an average each member is left out. "
        f"95 % intervals. {told}."
    )
    return estimates_figure(
        rows,
        title=_title(info),
        subtitle=subtitle,
        axis="change of NE with the part, against without it (left is better)",
        words=("lowers NE", "raises NE", "cannot tell"),
    )


def _trial(ablation: Ablation, record: StudyRecord) -> AblatedTrial:
    trial = find(record, ablation.trial)
    parts = [
        AblatedPart(
            trial=ablation.trial,
            removed=counted_from_one(part.removed),
            percent=-part.ne_percent.mean,
            low=-part.ne_percent.high if part.ne_percent.high is not None else None,
            high=-part.ne_percent.low if part.ne_percent.low is not None else None,
            flops=part.flops,
            flops_percent=part.flops_percent,
        )
        for part in ablation.parts
        if part.ne_percent is not None
    ]
    return AblatedTrial(
        trial=ablation.trial,
        name=trial_name(trial) if trial is not None else "a trial that the study no longer has",
        seeds=len(ablation.seeds),
        split=ablation.split,
        parts=tuple(parts),
    )


def _rows(trial: AblatedTrial, *, several: bool) -> list[Estimate]:
    """A row per part, with the winner's number where there are several."""
    whole = f"trial {trial.trial}: " if several else ""
    return [
        Estimate(
            label=f"{whole}{part.removed} ({decimals(part.flops_percent, 0)} % of FLOPs)",
            percent=part.percent,
            low=part.low,
            high=part.high,
            better=judged(part.low, part.high),
            hover=(f"without it NE is {percent(-part.percent)} and FLOPs are {si(part.flops)}",),
        )
        for part in trial.parts
    ]


def _title(info: AblationsInfo) -> str:
    sure = [part for trial in info.trials for part in trial.parts if part.high is not None and part.high < 0]
    if not sure:
        return "No part of a winner surely lowers NE"
    best = min(sure, key=lambda part: part.percent)
    return f"{best.removed} of trial {best.trial} brings most: {percent(best.percent)} NE"
