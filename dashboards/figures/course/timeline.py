"""When each training ran, and in which place: attempts by technique, and those that ran out of memory and climbed.

A record does not say in which place a trial ran; trials that ran side by side are drawn in different ones, each in
the first that was free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.course.clock import Run, runs_of
from dashboards.figures.style import INK, VERMILION, drawing, empty, legend_below, text
from dashboards.figures.techniques import Look, looks, study_techniques
from dashboards.names import trial_name
from dashboards.units import duration
from trials.record import Outcome, TrialKind
from trials.study_record import StudyRecord

TITLE = "What ran when"
ROW_HEIGHT, ENTRY_HEIGHT, MARGINS = 44, 20, 160
"""Pixels of a row, of an entry of the legend, and above and below all of them."""
OVERLAP_SECONDS = 0.05
"""Seconds by which two trials of one place may overlap: clocks of records are rounded."""
UNTRAINED = "averages, and what was cut short"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBar:
    """One attempt."""

    trial: int
    kind: TrialKind
    name: str
    stage: str
    place: int
    """Number of the place, from 0 on."""
    start: float
    seconds: float
    technique: str | None
    """None for what was not trained."""
    outcome: Outcome
    attempt: int
    """Number of the attempt, from 1 on."""
    attempts: int
    """Number of attempts that the trial had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineInfo:
    """What the figure shows."""

    bars: tuple[TimelineBar, ...]
    places: int
    ranks: int | None
    """Number of ranks of the study's cluster, which all train one candidate; None where no plan is executed, or
    candidates have one of several shapes."""
    techniques: tuple[str, ...]
    """All techniques of the study, in the order of the ladder."""
    left_out_seconds: float

    @property
    def climbs(self) -> int:
        """Number of attempts that ran out of memory and were followed by another one."""
        return sum(bar.outcome is Outcome.OUT_OF_MEMORY and bar.attempt < bar.attempts for bar in self.bars)


def timeline_info(record: StudyRecord) -> TimelineInfo:
    """What the figure shows: attempts of trials and retrainings, each in the first place that was free."""
    found = runs_of(record)
    free_at: list[float] = []
    bars: list[TimelineBar] = []
    for run in found.runs:
        place = next(
            (index for index, end in enumerate(free_at) if end <= run.start + OVERLAP_SECONDS), len(free_at)
        )
        free_at[place : place + 1] = [run.end]
        bars += _bars(run, place)
    cluster = record.cluster
    executed = cluster is not None and not cluster.shapes and any(_on_ranks(run) for run in found.runs)
    return TimelineInfo(
        bars=tuple(bars),
        places=len(free_at),
        ranks=cluster.hosts * cluster.gpus_per_host if cluster is not None and executed else None,
        techniques=study_techniques(record),
        left_out_seconds=found.left_out_seconds,
    )


def timeline_figure(info: TimelineInfo) -> go.Figure:
    """A row per place; a bar per attempt, crossed out where it ran out of memory."""
    if not info.bars:
        return empty("Shown as soon as a trial has begun.", title=TITLE)
    found = looks(info.techniques)
    used = {bar.technique for bar in info.bars}
    groups: list[tuple[str, Look | None, bool, list[TimelineBar]]] = []
    for technique, look in found.items():
        for ran_out in (False, True):
            own = [
                bar
                for bar in info.bars
                if bar.technique == technique and (bar.outcome is Outcome.OUT_OF_MEMORY) is ran_out
            ]
            groups.append((technique, look, ran_out, own))
    if None in used:
        groups.append((UNTRAINED, None, False, [bar for bar in info.bars if bar.technique is None]))
    ranks = "" if info.ranks is None or info.ranks == 1 else f"; a training takes all {info.ranks} ranks"
    subtitle = (
        f"A row per place in which a candidate trains{ranks}. A bar per attempt, coloured by memory technique; "
        "crossed out with a red edge: it ran out of memory, and the next attempt climbs the ladder."
    )
    if info.left_out_seconds:
        subtitle += f" Pauses of {duration(info.left_out_seconds)} in all are left out."
    traces = [
        _trace(name, look, bars, ran_out=ran_out, shown=not ran_out or name not in _well(info))
        for name, look, ran_out, bars in groups
        if bars
    ]
    figure = drawing(
        traces,
        title=_title(info),
        subtitle=subtitle,
        height=MARGINS + ROW_HEIGHT * info.places + ENTRY_HEIGHT * len(used),
    )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_xaxes(title_text="minutes", rangemode="tozero")
    places = list(range(info.places))
    figure.update_yaxes(
        tickvals=places,
        ticktext=[f"place {place + 1}" for place in places],
        range=[info.places - 0.5, -0.5],
        showgrid=False,
    )
    return legend_below(figure)


def _on_ranks(run: Run) -> bool:
    """Whether the trial was trained by the plan of the study's cluster."""
    return any(attempt.plan is not None for attempt in run.trial.attempts)


def _well(info: TimelineInfo) -> set[str | None]:
    return {bar.technique for bar in info.bars if bar.outcome is not Outcome.OUT_OF_MEMORY}


def _bars(run: Run, place: int) -> Iterator[TimelineBar]:
    """Attempts one after another from the start of the trial on; the last one takes what is left of its time."""
    trial, start = run.trial, run.start
    attempts: Sequence[tuple[str | None, Outcome, float | None]] = [
        (attempt.unsized_strategy, attempt.outcome, attempt.seconds) for attempt in trial.attempts
    ] or [(None if trial.kind is TrialKind.AVERAGE else trial.result.technique, trial.result.outcome, None)]
    for index, (technique, outcome, seconds) in enumerate(attempts, start=1):
        left = max(0.0, run.end - start)
        took = left if seconds is None else min(seconds, left)
        yield TimelineBar(
            trial=trial.number,
            kind=trial.kind,
            name=trial_name(trial),
            stage=run.stage,
            place=place,
            start=start,
            seconds=took,
            technique=technique,
            outcome=outcome,
            attempt=index,
            attempts=len(attempts),
        )
        start += took


def _trace(name: str, look: Look | None, bars: list[TimelineBar], *, ran_out: bool, shown: bool) -> go.Bar:
    return go.Bar(
        y=[bar.place for bar in bars],
        x=[bar.seconds / 60 for bar in bars],
        base=[bar.start / 60 for bar in bars],
        orientation="h",
        name=text(name),
        legendgroup=name,
        showlegend=shown,
        customdata=[bar.trial if bar.kind is not TrialKind.RETRAINING else None for bar in bars],
        marker={
            "color": look.color if look else "rgba(0,0,0,0)",
            "line": {"color": VERMILION if ran_out else INK, "width": 1.5 if ran_out else 0.4},
            "pattern": {
                "shape": "x" if ran_out else look.pattern if look else "",
                "size": 6,
                "solidity": 0.35 if ran_out else 0.2,
            },
        },
        hovertext=[_hover(bar) for bar in bars],
        hoverinfo="text",
    )


def _hover(bar: TimelineBar) -> str:
    kind = "retraining" if bar.kind is TrialKind.RETRAINING else "trial"
    outcome = bar.outcome.value.replace("_", " ")
    which = f", attempt {bar.attempt} of {bar.attempts}" if bar.attempts > 1 else ""
    return text(
        f"{kind} {bar.trial} ({bar.stage}){which}",
        bar.name,
        f"{bar.technique}: {outcome}" if bar.technique else outcome,
        f"from {duration(bar.start)}, {duration(bar.seconds)} long",
    )


def _title(info: TimelineInfo) -> str:
    trained = len({(bar.kind, bar.trial) for bar in info.bars if bar.technique is not None})
    count = "1 training" if trained == 1 else f"{trained} trainings"
    where = "one after another" if info.places == 1 else f"{info.places} side by side at most"
    climbs = ""
    if info.climbs:
        times = "once" if info.climbs == 1 else f"{info.climbs} times"
        climbs = f"; {times} one ran out of memory and climbed the ladder"
    return f"{count}, {where}{climbs}"
