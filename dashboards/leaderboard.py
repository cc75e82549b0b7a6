"""Leaderboard: a study's winners, then its front, then all other finished trials, by what is asked for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Literal, get_args

from dashboards.names import trial_name
from dashboards.rows import known_ne, marks, relative_percent
from dashboards.units import known
from dhen.values import Value
from trials.analyses import Better
from trials.record import Outcome, TrialRecord
from trials.study_record import StudyRecord

By = Literal["ne", "flops", "ms", "test"]
"""What a leaderboard is sorted by, the lowest first."""
KEYS: tuple[By, ...] = get_args(By)


class LeaderboardRow(Value):
    """One finished trial and what it costs. Values that are not known are None."""

    trial: int
    marks: tuple[str, ...]
    """What the study says of it: `baseline`, `best`, `knee`, `front`, and `winner` where it was chosen to be
    scored on test."""
    outcome: Outcome
    architecture: str
    """The model in short; of an average, its members."""
    ne: float | None
    """NE on validation."""
    vs_baseline_percent: float | None
    """NE on validation relative to the tuned baseline's."""
    test_ne: float | None
    """NE on test, of the baseline and the winners."""
    difference_percent: float | None
    """NE on test relative to the baseline's, mean over seeds, where `dhen-search confirm` has retrained both."""
    low_percent: float | None
    """Lower end of the 95 % interval of the difference."""
    high_percent: float | None
    """Upper end of that interval."""
    better: Better | None
    """Whether it is better than the baseline, by that comparison."""
    flops: float | None
    """FLOPs of a forward pass per example."""
    forward_ms: float | None
    """Measured milliseconds of a request, where serving has a limit."""
    technique: str | None
    """Memory technique that it was trained under; the planned one where nothing was trained."""
    predicted_peak_bytes: int | None
    """Predicted peak on the fullest rank of the study's cluster."""
    measured_peak_bytes: int | None
    """The peak that was measured."""
    export: str | None
    """Command that takes it away as a bundle; None where no weights are kept."""


class Leaderboard(Value):
    """What `dhen-search leaderboard` shows, and prints with `--json`."""

    study: str
    directory: str
    finished: bool
    running: bool
    by: By
    """What rows are sorted by, in each of three groups: baseline and winners, the rest of the front, all
    others."""
    finished_trials: int
    """Number of trials that have ended; without `--all` most have no row."""
    rows: tuple[LeaderboardRow, ...]


def leaderboard(record: StudyRecord, *, by: By = "ne", everything: bool = False) -> Leaderboard:
    """Returns the leaderboard of a study at any moment of its life.

    Args:
        record: the study.
        by: what rows are sorted by; trials of which it is not known come last.
        everything: all finished trials, not the front and the winners alone.
    """
    ended = [trial for trial in record.trials if not trial.result.outcome.unfinished]
    group = _group_of(record)
    shown = [trial for trial in ended if everything or group(trial) < OTHERS]
    rows = [(group(trial), _row(trial, record)) for trial in shown]
    rows.sort(key=lambda pair: (pair[0], *_order(pair[1], by)))
    return Leaderboard(
        study=record.name,
        directory=record.directory,
        finished=record.finished,
        running=record.running,
        by=by,
        finished_trials=len(ended),
        rows=tuple(row for _, row in rows),
    )


WINNERS, FRONT, OTHERS = range(3)
"""Groups of a leaderboard, in this order."""


def winners(record: StudyRecord) -> set[int]:
    """Returns numbers of the trials that the study has chosen; before that, of the best and the knee so far."""
    if record.choice is not None:
        return {winner.trial for winner in record.choice.winners}
    return {number for number in (record.best, record.knee) if number is not None}


def _group_of(record: StudyRecord) -> Callable[[TrialRecord], int]:
    first, front = winners(record) | {record.baseline, record.best}, set(record.front)

    def group(trial: TrialRecord) -> int:
        return WINNERS if trial.number in first else FRONT if trial.number in front else OTHERS

    return group


def _order(row: LeaderboardRow, by: By) -> tuple[float, float]:
    """Sort key: what is asked for, then NE; what is not known comes last."""
    asked_for = {"ne": row.ne, "flops": row.flops, "ms": row.forward_ms, "test": row.test_ne}[by]
    unknown = math.inf
    return unknown if asked_for is None else asked_for, unknown if row.ne is None else row.ne


def _row(trial: TrialRecord, record: StudyRecord) -> LeaderboardRow:
    result, compared = trial.result, record.comparison(trial.number)
    ne = result.validation.ne if result.validation and known(result.validation.ne) else None
    chosen = record.choice is not None and trial.number in winners(record)
    tested = result.test.ne if result.test and known(result.test.ne) else None
    return LeaderboardRow(
        trial=trial.number,
        marks=(*marks(trial, record), *(("winner",) if chosen else ())),
        outcome=result.outcome,
        architecture=trial_name(trial),
        ne=ne,
        vs_baseline_percent=relative_percent(ne, known_ne(record.baseline_for(trial))),
        test_ne=tested,
        difference_percent=compared.difference_percent if compared else None,
        low_percent=compared.low_percent if compared else None,
        high_percent=compared.high_percent if compared else None,
        better=compared.better if compared else None,
        flops=trial.job.flops,
        forward_ms=trial.plan.serving_ms,
        technique=result.technique or trial.plan.technique,
        predicted_peak_bytes=trial.plan.peak_bytes,
        measured_peak_bytes=result.measured.peak_memory_bytes,
        export=_export(trial, record) if trial.number in record.exportable else None,
    )


def _export(trial: TrialRecord, record: StudyRecord) -> str:
    pick = "best" if trial.number == record.best else str(trial.number)
    out = "best" if pick == "best" else f"trial-{pick}"
    return f"dhen-search export {shlex.quote(record.directory)} --pick {pick} --out {out}"
