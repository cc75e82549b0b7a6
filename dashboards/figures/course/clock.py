"""The clock of a study: when each of its trials and retrainings ran, in seconds since its beginning.

Pauses in which nothing ran, such as a night between two sessions, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from dashboards.units import known
from trials.record import MADE_OF_WINNERS, Outcome, TrialKind, TrialRecord
from trials.study_record import StageName, StudyRecord

PAUSE_SECONDS = 300.0
"""Length from which time in which nothing ran is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trial, or a retraining, on the study's clock."""

    trial: TrialRecord
    start: float
    end: float

    @property
    def stage(self) -> str:
        """The stage of the study that it belongs to."""
        return stage_of(self.trial)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What ran, in the order of starting."""

    runs: tuple[Run, ...]
    left_out_seconds: float
    """Length of all pauses that the clock leaves out."""

    def stretches(self) -> tuple[tuple[str, float, float], ...]:
        """Stages with their start and end, one after another; neighbours of one stage are joined."""
        joined: list[tuple[str, float, float]] = []
        for run in self.runs:
            if joined and joined[-1][0] == run.stage:
                stage, start, end = joined[-1]
                joined[-1] = stage, start, max(end, run.end)
            else:
                joined.append((run.stage, run.start, run.end))
        return tuple(joined)


ABLATION = "ablation"
"""What `dhen-search ablate` trains, after the study's own stages."""
STAGES = (
    StageName.BASELINE,
    StageName.SEARCH,
    StageName.TUNING,
    StageName.ALL_ROWS,
    StageName.AVERAGES,
    StageName.CONFIRMATION,
    ABLATION,
)
"""Stages that train or average networks. The passes are found with the baseline's trials, and what learns from an
average is drawn with the averages; winners that are trained once more on validation too, with the confirmation."""


def stage_of(trial: TrialRecord) -> str:
    """The stage of the study in which a trial, or a retraining, was made; one of `STAGES`."""
    if trial.kind is TrialKind.RETRAINING:
        return ABLATION if trial.origin.removed else StageName.CONFIRMATION
    if trial.kind in MADE_OF_WINNERS:
        return StageName.AVERAGES
    if trial.origin.promoted_from is not None:
        return StageName.ALL_ROWS
    if trial.kind is TrialKind.BASELINE:
        return StageName.BASELINE
    return StageName.SEARCH if trial.origin.tuned_from is None else StageName.TUNING


def runs_of(record: StudyRecord, *, taken_over: bool = False) -> Runs:
    """Returns what ran, on the study's clock. A result that was taken over has no time of its own: it is left out,
    or with `taken_over` those of other studies stand at the moment at which the study had them."""
    spans = sorted(_spans((*record.trials, *record.retrainings), taken_over), key=lambda span: span[1:])
    runs, pauses = [], 0.0
    origin = covered = spans[0][1] if spans else 0.0
    for trial, start, end in spans:
        if start - covered > PAUSE_SECONDS:
            pauses += start - covered
        covered = max(covered, end)
        runs.append(Run(trial=trial, start=start - origin - pauses, end=end - origin - pauses))
    return Runs(runs=tuple(runs), left_out_seconds=pauses)


def _spans(trials: Iterable[TrialRecord], taken_over: bool) -> Iterator[tuple[TrialRecord, float, float]]:
    for trial in trials:
        from_elsewhere = taken_over and trial.origin.reused_from_study is not None
        if trial.origin.started_at is None or (trial.shared and not from_elsewhere):
            continue
        start = datetime.fromisoformat(trial.origin.started_at).timestamp()
        yield trial, start, start if from_elsewhere else start + _seconds(trial)


def _seconds(trial: TrialRecord) -> float:
    """How long a trial took; while it runs, and where it was cut short, how far its curve has come."""
    seconds = trial.result.seconds
    if seconds is not None and known(seconds) and trial.result.outcome is not Outcome.RUNNING:
        return seconds
    return trial.result.curve[-1].seconds if trial.result.curve else 0.0
