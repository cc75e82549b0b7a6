"""Winners of studies of other logs as start points: `start_from`."""

from __future__ import annotations

import shutil
from pathlib import Path

from command_line import SMALL, Run, write_log

from search.read_study import read_study
from search.study.reuse import MOST, next_point, points_of
from spaces.space import load_space
from trials.records.trial_record import TrialKind, TrialRecord


def test_the_winners_come_nearest_in_the_space(study: Path) -> None:
    record, space = read_study(study), load_space("tiny")
    points = points_of(space, [record])
    best = record.trial(record.front[-1])
    wanted = {name: value for name, value in best.point.items() if name not in space.left_for_tuning}
    # axes that its network does not use are at their first values
    assert any(
        point == wanted | {name: point[name] for name in point if name not in _used(best)} for point in points
    )
    assert len(points) <= MOST
    assert points_of(space, [record, record]) == points
    default = points_of(load_space("default"), [record])
    assert {point["embedding_dim"] for point in default} <= {8, 16}  # the shortest there is 8


def _used(trial: TrialRecord) -> set[str]:
    """Axes that the network of a trial has; others are at their first values in a start point."""
    layers = trial.job.model["layers"]
    kinds = {module["kind"] for layer in layers for module in layer["modules"]}
    return {
        name
        for name in trial.point
        if not name.startswith("layer.") or name.split(".")[1] in kinds or name.count(".") == 1
    }


def test_a_start_point_is_taken_once() -> None:
    done = [TrialRecord(number=1, kind=TrialKind.CANDIDATE, point={"depth": 2, "embedding_dim": 8})]
    points = [{"depth": 2}, {"depth": 1}]
    assert next_point(points, []) == {"depth": 2}
    assert next_point(points, done) == {"depth": 1}
    assert next_point(points[:1], done) == {}
    assert next_point([done[0].point, *points], done) == {"depth": 1}


def test_a_study_of_another_log_begins_with_what_won(dhen_search: Run, study: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other.csv", 1000, seed=4)
    out, moved = tmp_path / "study", tmp_path / "moved" / "again"
    shutil.copytree(study, tmp_path / "copied")
    moved.parent.mkdir()
    (tmp_path / "copied").rename(tmp_path / "renamed").rename(moved)
    words = ("run", "--data", other, "--out", out, *SMALL, "sampler=random", f"start_from={moved}")
    starts, own = points_of(load_space("tiny"), [read_study(study)]), len(load_space("tiny").config.start)
    dhen_search(*words, f"trials={own + 2}")  # the baseline's and the space's own come first
    *before, last = read_study(out).candidates
    assert next_point(starts, before).items() <= last.point.items()
    dhen_search(*words, f"trials={own + 4}")
    tried = [trial.point.items() for trial in read_study(out).candidates]
    assert all(any(start.items() <= point for point in tried) for start in starts[:3])
    said = dhen_search(*words[:-1], "start_from=nowhere", "trials=4", code=2).stderr
    assert "start_from" in said
    fresh = ("run", "--data", other, "--out", tmp_path / "new", *SMALL, "trials=1", "start_from=nowhere")
    said = dhen_search(*fresh, code=2, cwd=tmp_path).stderr
    assert f"start_from: {tmp_path / 'nowhere'}: no study here" in said
