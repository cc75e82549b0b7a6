"""The course of a study: best NE and hypervolume against time, what ran when, and where each trial's time went.

The clock counts seconds since the study's beginning. Pauses in which nothing ran, such as a night between two
sessions, are left out.

The hypervolume is the area that the front covers below the baseline's NE, over the logarithm of FLOPs up to the
dearest network's: it grows if a network is better, and if one as good is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE_BLUE,
    PURPLE,
    SKY,
    VERMILION,
    TechniqueStyle,
    drawing,
    empty,
    legend_below,
    looks,
    study_techniques,
    text,
)
from dashboards.names import decimals, duration, known, percent, trial_name
from dashboards.rows import baseline_ne, known_ne
from trials.records.study_record import StageName, StudyRecord, relative_ne_percent
from trials.records.trial_record import MADE_OF_WINNERS, Outcome, TrialKind, TrialRecord

PAUSE_SECONDS = 300.0
"""Length from which time in which nothing ran is left out."""
ABLATION = "ablation"
"""What `dhen-search ablate` trains, after the study's own stages."""
TINTS = {
    StageName.BASELINE: VERMILION,
    StageName.SEARCH: BLUE,
    StageName.TUNING: GREEN,
    StageName.ALL_ROWS: ORANGE,
    StageName.AVERAGES: PURPLE,
    StageName.CONFIRMATION: SKY,
    ABLATION: GREY,
}
"""Stages that train or average networks. The passes are found with the baseline's trials, and what learns from an
average is drawn with the averages; winners that are trained once more on validation too, with the confirmation."""
WIDE = 0.05
"""Share of the time that a stage takes at least for its name to have room."""
MOST_BANDS = 60
ROW_HEIGHT, ENTRY_HEIGHT, MARGINS = 44, 20, 160
"""Pixels of a row, of an entry of the legend, and above and below all of them."""
OVERLAP_SECONDS = 0.05
"""Seconds by which two trials of one place may overlap: clocks of records are rounded."""
UNTRAINED = "averages, and what was cut short"


class TrainingSpan(NamedTuple):
    """A trial, or a retraining, on the study's clock."""

    trial: TrialRecord
    start: float
    end: float


def stage_of(trial: TrialRecord) -> str:
    """The stage of the study in which a trial, or a retraining, was made; one of `TINTS`."""
    if trial.kind is TrialKind.RETRAINING:
        return ABLATION if trial.origin.removed else StageName.CONFIRMATION
    if trial.kind in MADE_OF_WINNERS:
        return StageName.AVERAGES
    if trial.origin.promoted_from is not None:
        return StageName.ALL_ROWS
    if trial.kind is TrialKind.BASELINE:
        return StageName.BASELINE
    return StageName.SEARCH if trial.origin.tuned_from is None else StageName.TUNING


def runs_of(record: StudyRecord, *, taken_over: bool = False) -> tuple[list[TrainingSpan], float]:
    """What ran, in the order of starting, and the length of all pauses that the clock leaves out.

    A result that was taken over has no time of its own: it is left out, or with `taken_over` those of other
    studies stand at the moment at which the study had them.
    """
    spans = []
    for trial in (*record.trials, *record.retrainings):
        from_elsewhere = taken_over and trial.origin.reused_from_study is not None
        if trial.origin.started_at is None or (trial.shared and not from_elsewhere):
            continue
        start = datetime.fromisoformat(trial.origin.started_at).timestamp()
        seconds, curve = trial.result.seconds, trial.result.curve
        if seconds is None or not known(seconds) or trial.result.outcome is Outcome.RUNNING:
            seconds = curve[-1].seconds if curve else 0.0  # how far it came, or has come
        spans.append((trial, start, start if from_elsewhere else start + seconds))
    spans.sort(key=lambda span: span[1:])
    runs, pauses = [], 0.0
    origin = covered = spans[0][1] if spans else 0.0
    for trial, start, end in spans:
        if start - covered > PAUSE_SECONDS:
            pauses += start - covered
        covered = max(covered, end)
        runs.append(TrainingSpan(trial=trial, start=start - origin - pauses, end=end - origin - pauses))
    return runs, pauses


def stretches(runs: Iterable[TrainingSpan]) -> list[tuple[str, float, float]]:
    """Stages with their start and end, one after another; neighbours of one stage are joined."""
    joined: list[tuple[str, float, float]] = []
    for run in runs:
        stage = stage_of(run.trial)
        if joined and joined[-1][0] == stage:
            _, start, end = joined[-1]
            joined[-1] = stage, start, max(end, run.end)
        else:
            joined.append((stage, run.start, run.end))
    return joined


def hypervolume(points: Iterable[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The area between points (cost, value) and a reference that is worse in both; lower is better."""
    area, lowest = 0.0, reference[1]
    ordered = sorted(point for point in points if point[0] < reference[0] and point[1] < reference[1])
    for cost, value in ordered:
        if value < lowest:
            area += (reference[0] - cost) * (lowest - value)
            lowest = value
    return area


def gain_figure(record: StudyRecord) -> go.Figure:
    """What the study had found by when, over bands for its stages: best NE above, hypervolume in percent of the
    last one below."""
    title = "Best NE and hypervolume against time"
    runs, pauses = runs_of(record, taken_over=True)
    done = []
    for run in sorted(runs, key=lambda run: run.end):
        ne, flops = known_ne(run.trial), run.trial.job.flops
        network = run.trial.kind not in (TrialKind.BASELINE, TrialKind.RETRAINING)
        completed = run.trial.result.outcome is Outcome.COMPLETED
        if network and completed and ne is not None and flops is not None and flops > 0:
            done.append((run, math.log10(flops), ne))
    if not done:
        return empty("Shown as soon as a candidate has completed.", title=title)
    baseline = baseline_ne(record)
    top = baseline if baseline is not None else max(ne for _, _, ne in done)
    dearest = max(cost for _, cost, _ in done) + 1e-9
    lowest: list[float] = []
    volumes: list[float] = []
    front: list[tuple[float, float]] = []
    for _, cost, ne in done:
        lowest.append(min([*lowest[-1:], ne]))
        value = relative_ne_percent(ne, top)
        # what others beat in both stays out, so that a study of thousands of trials is quick to draw
        if not any(other[0] <= cost and other[1] <= value for other in front):
            front = [other for other in front if other[0] < cost or other[1] < value] + [(cost, value)]
        volumes.append(hypervolume(front, (dearest, 0.0)))
    shares = [100 * volume / volumes[-1] if volumes[-1] else 0.0 for volume in volumes]
    hovers = [
        text(
            f"{duration(run.end)}: trial {run.trial.number} completed",
            trial_name(run.trial),
            f"lowest NE so far {decimals(ne, 5)}",
            f"hypervolume {decimals(share, 1)} % of the last",
        )
        for (run, _, _), ne, share in zip(done, lowest, shares, strict=True)
    ]
    traces = [
        go.Scatter(
            x=[run.end / 60 for run, _, _ in done],
            y=values,
            yaxis=axis,
            mode="lines+markers",
            name=name,
            line={"color": color, "width": 2, "shape": "hv"},
            marker={"color": color, "size": 5, "symbol": symbol},
            customdata=[run.trial.number for run, _, _ in done],
            hovertext=hovers,
            hoverinfo="text",
        )
        for values, axis, name, color, symbol in (
            (lowest, "y", "lowest NE", BLUE, "circle"),
            (shares, "y2", "hypervolume", GREEN, "square"),
        )
    ]
    stages = stretches(runs)
    first = done[lowest.index(lowest[-1])][0]
    at = f"after {duration(first.end)} of {duration(max(stop for _, _, stop in stages))}"
    title = f"The lowest NE, {decimals(lowest[-1], 5)}, was reached {at}"
    if baseline is not None:
        relative = percent(relative_ne_percent(lowest[-1], baseline))
        title = f"The lowest NE, {relative} to the baseline, came {at}"
    subtitle = (
        "Above: lowest NE on validation so far. Below: hypervolume, the area that the front covers under the "
        "baseline's NE over the logarithm of FLOPs, in percent of what it is at the end. Bands: "
        f"stages of the study.{_left_out(pauses)}"
    )
    figure = drawing(traces, title=title, subtitle=subtitle, height=520)
    figure.update_layout(
        showlegend=False,
        yaxis={"domain": [0.5, 0.94], "title": {"text": "lowest NE"}},
        yaxis2={
            "domain": [0.0, 0.42],
            "title": {"text": "hypervolume"},
            "ticksuffix": " %",
            "range": [-4, 106],
            "gridcolor": figure.layout.yaxis.gridcolor,
            "zeroline": False,
        },
    )
    minutes = max([stop for _, _, stop in stages] + [done[-1][0].end]) / 60
    figure.update_xaxes(title_text="minutes", anchor="y2", range=[0, minutes * 1.01 or 1])
    if baseline is not None:
        line = {"color": VERMILION, "width": 1, "dash": "dot"}
        figure.add_hline(baseline, line=line, annotation_text="baseline", layer="below")
    # a band is named at its top if it is wide enough, the first of its stage in any case
    named = set[str]()
    for stage, start, end in stages[:MOST_BANDS]:
        band = {"x0": start / 60, "x1": end / 60, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
        look = {"fillcolor": TINTS[stage], "opacity": 0.09, "line_width": 0, "layer": "below"}
        figure.add_shape(type="rect", **band, **look)
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
    return figure


class Bar(NamedTuple):
    """One attempt of a run; trials that ran side by side are drawn in different places."""

    run: TrainingSpan
    place: int
    start: float
    seconds: float
    technique: str | None
    """None for what was not trained."""
    outcome: Outcome
    attempt: int
    """Number of the attempt, from 1 on."""
    attempts: int


def timeline_figure(record: StudyRecord) -> go.Figure:
    """When each training ran: a row per place, a bar per attempt, crossed out if it ran out of memory.

    A record does not say in which place a trial ran: each is drawn in the first that was free.
    """
    runs, pauses = runs_of(record)
    if not runs:
        return empty("Shown as soon as a trial has begun.", title="What ran when")
    free_at: list[float] = []
    bars: list[Bar] = []
    for run in runs:
        free = (index for index, end in enumerate(free_at) if end <= run.start + OVERLAP_SECONDS)
        place = next(free, len(free_at))
        free_at[place : place + 1] = [run.end]
        # attempts one after another from the start of the trial on; the last one takes what is left of its time
        trial, start = run.trial, run.start
        untrained_as = None if trial.kind is TrialKind.AVERAGE else trial.result.technique
        attempts: list[tuple[str | None, Outcome, float | None]] = [
            (attempt.unsized_strategy, attempt.outcome, attempt.seconds) for attempt in trial.attempts
        ] or [(untrained_as, trial.result.outcome, None)]
        for index, (technique, outcome, seconds) in enumerate(attempts, start=1):
            left = max(0.0, run.end - start)
            took = left if seconds is None else min(seconds, left)
            bars.append(Bar(run, place, start, took, technique, outcome, index, len(attempts)))
            start += took
    ran_out = Outcome.OUT_OF_MEMORY
    traces = []
    for name, look in looks(study_techniques(record)).items():
        own = [bar for bar in bars if bar.technique == name]
        well = [bar for bar in own if bar.outcome is not ran_out]
        short = [bar for bar in own if bar.outcome is ran_out]
        traces += [_bar_trace(name, look, well, ran_out=False, shown=True)] if well else []
        traces += [_bar_trace(name, look, short, ran_out=True, shown=not well)] if short else []
    untrained = [bar for bar in bars if bar.technique is None]
    traces += [_bar_trace(UNTRAINED, None, untrained, ran_out=False, shown=True)] if untrained else []

    places = range(len(free_at))
    trained = len({(bar.run.trial.kind, bar.run.trial.number) for bar in bars if bar.technique is not None})
    title = "1 training, " if trained == 1 else f"{trained} trainings, "
    title += "one after another" if len(places) == 1 else f"{len(places)} side by side at most"
    climbs = sum(bar.outcome is ran_out and bar.attempt < bar.attempts for bar in bars)
    if climbs:
        times = "once" if climbs == 1 else f"{climbs} times"
        title += f"; {times} one ran out of memory and climbed the ladder"
    # by a plan of one shape, a training takes all ranks of the study's cluster
    cluster, takes = record.cluster, ""
    planned = any(attempt.plan is not None for run in runs for attempt in run.trial.attempts)
    if cluster is not None and not cluster.shapes and planned:
        ranks = cluster.hosts * cluster.gpus_per_host
        takes = f"; a training takes all {ranks} ranks" if ranks != 1 else ""
    subtitle = (
        f"A row per place in which a candidate trains{takes}. A bar per attempt, coloured by memory technique; "
        "crossed out with a red edge: it ran out of memory, and the next attempt climbs the ladder."
        f"{_left_out(pauses)}"
    )
    height = MARGINS + ROW_HEIGHT * len(places) + ENTRY_HEIGHT * len({bar.technique for bar in bars})
    figure = drawing(traces, title=title, subtitle=subtitle, height=height)
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_xaxes(title_text="minutes", rangemode="tozero")
    figure.update_yaxes(
        tickvals=list(places),
        ticktext=[f"place {place + 1}" for place in places],
        range=[len(places) - 0.5, -0.5],
        showgrid=False,
    )
    return legend_below(figure)


def _left_out(pauses: float) -> str:
    return f" Pauses of {duration(pauses)} in all are left out." if pauses else ""


def _bar_trace(
    name: str, look: TechniqueStyle | None, bars: Sequence[Bar], *, ran_out: bool, shown: bool
) -> go.Bar:
    hovers = []
    for bar in bars:
        trial, outcome = bar.run.trial, bar.outcome.value.replace("_", " ")
        kind = "retraining" if trial.kind is TrialKind.RETRAINING else "trial"
        which = f", attempt {bar.attempt} of {bar.attempts}" if bar.attempts > 1 else ""
        hover = text(
            f"{kind} {trial.number} ({stage_of(trial)}){which}",
            trial_name(trial),
            f"{bar.technique}: {outcome}" if bar.technique else outcome,
            f"from {duration(bar.start)}, {duration(bar.seconds)} long",
        )
        hovers.append(hover)
    return go.Bar(
        y=[bar.place for bar in bars],
        x=[bar.seconds / 60 for bar in bars],
        base=[bar.start / 60 for bar in bars],
        orientation="h",
        name=text(name),
        legendgroup=name,
        showlegend=shown,
        customdata=[
            bar.run.trial.number if bar.run.trial.kind is not TrialKind.RETRAINING else None for bar in bars
        ],
        marker={
            "color": look.color if look else "rgba(0,0,0,0)",
            "line": {"color": VERMILION if ran_out else INK, "width": 1.5 if ran_out else 0.4},
            "pattern": {
                "shape": "x" if ran_out else look.pattern if look else "",
                "size": 6,
                "solidity": 0.35 if ran_out else 0.2,
            },
        },
        hovertext=hovers,
        hoverinfo="text",
    )


def time_figure(record: StudyRecord) -> go.Figure:
    """Where the time of each trial went: training, evaluation, all else (start, planning, transfer).

    Trials that trained nothing of their own (a shared result, an average) have no bar.
    """
    numbers: list[int] = []
    parts: list[tuple[float, float, float]] = []
    for trial in record.trials:
        whole, measured = trial.result.seconds, trial.result.measured
        if trial.shared or trial.kind is TrialKind.AVERAGE or whole is None or not known(whole):
            continue
        # the parts never exceed the whole, whichever clock was read last
        training = min(measured.train_seconds or 0.0, whole)
        evaluation = min(measured.evaluate_seconds or 0.0, whole - training)
        numbers.append(trial.number)
        parts.append((training, evaluation, whole - training - evaluation))
    total = sum(map(sum, parts))
    if total <= 0:
        return empty("Shown as soon as a trial has ended.", title="Where the time went")
    columns = dict(zip(("training", "evaluation", "all else"), zip(*parts, strict=True), strict=True))
    traces = [
        go.Bar(
            x=numbers,
            y=columns[name],
            name=name,
            marker={"color": color, "line": {"width": 0}},
            hovertext=[
                text(f"trial {number}", f"{name} {duration(seconds)}")
                for number, seconds in zip(numbers, columns[name], strict=True)
            ],
            hoverinfo="text",
        )
        for name, color in (("training", BLUE), ("evaluation", PALE_BLUE), ("all else", GREY))
    ]
    share = sum(columns["training"]) / total
    figure = drawing(
        traces,
        title=f"Training took {100 * share:.0f} % of {duration(total)} in all trials together",
        subtitle="Wall clock of each trial; trials may have run side by side.",
        height=300,
    )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title_text="trial")
    figure.update_yaxes(title_text="seconds")
    return figure
