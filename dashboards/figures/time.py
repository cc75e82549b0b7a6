"""Where the time of each trial went: training, evaluation, all else (start, planning, transfer)."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, GREY, PALE_BLUE, drawing, empty, text
from dashboards.units import duration, known
from trials.record import TrialKind, TrialRecord
from trials.study_record import StudyRecord

HEIGHT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTime:
    """Seconds of one trial, in parts that sum to its wall clock."""

    number: int
    training: float
    evaluation: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeInfo:
    """What the figure shows: trials with a known wall clock, in order of number."""

    trials: tuple[TrialTime, ...]

    @property
    def total(self) -> float:
        """Seconds of all trials together."""
        return sum(trial.training + trial.evaluation + trial.other for trial in self.trials)


def time_info(record: StudyRecord) -> TimeInfo:
    """Trials that trained nothing of their own (a shared result, an average) have no bar."""
    trained = (trial for trial in record.trials if not trial.shared and trial.kind is not TrialKind.AVERAGE)
    timed = (trial for trial in trained if known(trial.result.seconds))
    return TimeInfo(trials=tuple(_time(trial) for trial in timed))


def time_figure(info: TimeInfo) -> go.Figure:
    """One stacked bar per trial."""
    if not info.trials or info.total <= 0:
        return empty("Shown as soon as a trial has ended.", title="Where the time went")
    series = (
        ("training", BLUE, [trial.training for trial in info.trials]),
        ("evaluation", PALE_BLUE, [trial.evaluation for trial in info.trials]),
        ("all else", GREY, [trial.other for trial in info.trials]),
    )
    share = sum(trial.training for trial in info.trials) / info.total
    figure = drawing(
        (_bars(info, name, colour, seconds) for name, colour, seconds in series),
        title=f"Training took {100 * share:.0f} % of {duration(info.total)} in all trials together",
        subtitle="Wall clock of each trial; trials may have run side by side.",
        height=HEIGHT,
    )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title_text="trial")
    figure.update_yaxes(title_text="seconds")
    return figure


def _time(trial: TrialRecord) -> TrialTime:
    """Seconds of a trial; the parts never exceed the whole, whichever clock was read last."""
    total = trial.result.seconds or 0.0
    training = min(trial.result.measured.train_seconds or 0.0, total)
    evaluation = min(trial.result.measured.evaluate_seconds or 0.0, total - training)
    other = total - training - evaluation
    return TrialTime(number=trial.number, training=training, evaluation=evaluation, other=other)


def _bars(info: TimeInfo, name: str, colour: str, seconds: list[float]) -> go.Bar:
    hovers = [
        text(f"trial {trial.number}", f"{name} {duration(value)}")
        for trial, value in zip(info.trials, seconds, strict=True)
    ]
    return go.Bar(
        x=[trial.number for trial in info.trials],
        y=seconds,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        hovertext=hovers,
        hoverinfo="text",
    )
