"""What trainings and scorings are expected to take, from the trainings of a study so far.

Nothing is modelled: a network that was trained takes as long again, and a candidate that is not known yet as long
as three in four of the latest ones at most. Both hold what a training takes beside its steps: its processes, its
data, its evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from search.planning.step_correction import StepCorrections
from trials.record import Outcome, TrialRecord

LATEST = 20
"""Number of trainings that say what the next one takes: proposals grow larger or smaller as a search goes on."""
QUANTILE = 0.75
"""Share of the latest trainings that took no longer than is expected of the next."""


def scoring_seconds(trial: TrialRecord, rows: float) -> float:
    """Seconds of computing that it takes to score a trained network on `rows` times as many rows as validation
    has."""
    evaluations = len(trial.result.curve)
    return rows * (trial.result.measured.evaluate_seconds or 0.0) / evaluations if evaluations else 0.0


def process_seconds(trials: Iterable[TrialRecord]) -> float:
    """Seconds that processes take to start and to end: the least that a training took beside its work."""
    return min(
        (
            max(0.0, (trial.result.seconds or 0.0) - trial.result.measured.whole_seconds)
            for trial in trials
            if trial.result.measured.whole_seconds > 0.0 and not trial.shared
        ),
        default=0.0,
    )


def expected_seconds(trials: Sequence[TrialRecord]) -> float:
    """Seconds that the next of such trainings is expected to take; 0 where none has taken any."""
    trained = (trial for trial in trials if trial.result.outcome is not Outcome.INFEASIBLE)
    took = [seconds for trial in trained if (seconds := trial.result.seconds or 0.0) > 0.0]
    latest = sorted(took[-LATEST:])
    return latest[math.ceil(QUANTILE * len(latest)) - 1] if latest else 0.0


def expected_by_plan(
    seconds_per_example: float, trials: Sequence[TrialRecord], corrections: StepCorrections | None = None
) -> float | None:
    """Seconds that a training is expected to take whose planned steps take so long per example: as many times as
    long as the middle one of the latest trainings by its own plan. None where no plan has a time."""
    took = [
        trial.result.whole_seconds / planned
        for trial in trials
        if trial.result.training_seconds > 0.0
        and (planned := planned_seconds(trial, corrections)) is not None
    ]
    return seconds_per_example * median(took[-LATEST:]) if took else None


def planned_seconds(trial: TrialRecord, corrections: StepCorrections | None = None) -> float | None:
    """Seconds per example of a trial's planned step, corrected by what is known now: plans of different times
    compare. None where its plan has no time."""
    step = trial.plan.step_seconds if corrections is None else corrections.seconds(trial)
    batch = trial.job.training.get("batch_size")
    return step / batch if step and batch else None


def side_by_side_seconds(seconds: Iterable[float], places: int) -> float:
    """Seconds that activities of these lengths take on so many places (Graham's bound is a third above it)."""
    each = list(seconds)
    return max(max(each, default=0.0), sum(each) / places)
