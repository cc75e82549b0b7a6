"""What was best in earlier studies of other logs, as start points: `start_from=runs/last-week`.

NE on another log says nothing here, so the sampler learns nothing of these studies (`warm_start` is for those of
the same log). But what won on a log that is like this one, with the settings that it was trained with, is worth
a candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.values import parse
from search.read_study import read_study
from spaces.nearest import nearest_point
from spaces.space import Point, Space
from trials.job import TrainingConfig
from trials.record import TrialRecord
from trials.study_record import StudyRecord

MOST = 3
"""Networks of one study that are taken, at most: this study's budget is for what is new."""


def points_of(space: Space, records: Iterable[StudyRecord]) -> list[Point]:
    """Start points from studies of any log: the best, the knee and the rest of the front by NE, three networks of
    each study at most, as the nearest that the space has. Points may leave axes open."""
    points: list[Point] = []
    for record in records:
        for trial in _best_networks(record)[:MOST]:
            training = parse(TrainingConfig, trial.job.training, record.directory)
            point = nearest_point(space, parse_model(trial.job.model, record.directory), dict(training))
            if point not in points:
                points.append(point)
    return points


def next_point(points: Iterable[Point], proposed: Collection[TrialRecord]) -> Point:
    """The first of the points that none of these candidates has; empty past the last."""
    tried = [trial.point.items() for trial in proposed]
    return next((point for point in points if not any(point.items() <= known for known in tried)), {})


def read_other_study(name: str) -> StudyRecord:
    """The study in a directory that `start_from` names.

    Raises:
        UserError: where there is none, or none of its candidates has a result.
    """
    try:
        record = read_study(Path(name))
    except UserError as error:
        raise UserError(f"start_from: {error}") from None
    if not record.front:
        raise UserError(
            f"start_from: {name}: none of its candidates has a result so far; name another study."
        )
    return record


def _best_networks(record: StudyRecord) -> list[TrialRecord]:
    """Networks of the best, of the knee, then of the rest of the front, the lowest NE first."""
    winners = [number for number in (record.best, record.knee, *reversed(record.front)) if number is not None]
    networks = (network for number in winners for network in record.networks(record.trial(number)))
    return list({network.job.fingerprint: network for network in networks}.values())
