"""A study with fewer points of its learning curves, as many as a figure of all of them can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from trials.record import CurvePoint, TrialRecord
from trials.study_record import StudyRecord

MOST_POINTS = 10_000
"""Points of all curves together that are drawn; a figure is some 1,000 pixels wide."""
FEWEST_EACH = 6
T = TypeVar("T")


def with_thin_curves(record: StudyRecord) -> StudyRecord:
    """Returns the record as figures draw it: where its curves have too many points together, those off the front
    have fewer, among them their first, their best and their last one.

    The front and the baseline, which others are compared with, keep all of theirs.
    """
    whole = {*record.front, record.baseline, record.best, record.knee}
    counts = [len(trial.result.curve) for trial in record.trials if trial.number not in whole]
    if sum(counts) <= MOST_POINTS:
        return record
    most = max(FEWEST_EACH, MOST_POINTS // len(counts))
    thin = (trial if trial.number in whole else _thin(trial, most) for trial in record.trials)
    return record.replace(trials=tuple(thin))


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Returns values at even distances, the first and the last among them; all where they are no more than
    `most`, which is two or more."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(place * step)] for place in range(most)]


def _thin(trial: TrialRecord, most: int) -> TrialRecord:
    curve = trial.result.curve
    if len(curve) <= most:
        return trial
    best = min(curve, key=lambda point: point.validation.ne)
    kept = {point.examples: point for point in (*thinned(curve, most - 1), best)}
    return trial.with_result(curve=tuple(sorted(kept.values(), key=_examples)))


def _examples(point: CurvePoint) -> int:
    return point.examples
