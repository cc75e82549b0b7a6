"""Scorings on fake processes: each network once, one more try for what was killed, an error that teaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_processes import FakeLauncher, FakeRun, failed, killed, progress, scored
from priced import JOB

from dhen.errors import UserError
from search.execution.retraining import score_networks, score_one
from search.execution.trainer import Trainer, new_record
from trials.data.prepared_log import PreparedLog
from trials.records.job import Job
from trials.records.task import Task
from trials.records.trial_record import TrialKind, TrialRecord


def network(number: int) -> tuple[TrialRecord, Job]:
    job = JOB.replace(seed=number)
    return new_record(number, TrialKind.CANDIDATE, {}, job), job


def trainer(directory: Path, script: Callable[[Task], FakeRun]) -> tuple[Trainer, FakeLauncher]:
    launcher, log = FakeLauncher(script), PreparedLog(directory, manifest=None)  # type: ignore[arg-type]
    return Trainer(launcher, log, directory, threads=1, precision="fp32"), launcher


def test_each_network_is_scored_once_side_by_side_and_taken_up_as_late_as_there_is_a_place(
    tmp_path: Path,
) -> None:
    its, launcher = trainer(
        tmp_path, lambda task: FakeRun([progress(1)], [], [scored("test", task.job.seed)])
    )
    taken: list[tuple[int, float]] = []
    begun: list[int] = []

    def networks() -> Iterator[tuple[TrialRecord, Job]]:
        for number in range(4):
            begun.append(number - len(taken))
            yield network(number)

    score_networks(
        networks(), "test", its, lambda record, m: taken.append((record.number, m.ne)), side_by_side=2
    )
    assert sorted(taken) == [(number, float(number)) for number in range(4)]
    assert launcher.most_at_once == 2
    assert max(begun) == 1
    assert {task.score_split for task in launcher.tasks} == {"test"}


def test_a_scoring_that_was_killed_has_one_more_try_for_each_network(tmp_path: Path) -> None:
    first = {0, 1}

    def script(task: Task) -> FakeRun:
        if task.job.seed in first:
            first.discard(task.job.seed)
            return FakeRun([killed()])
        return FakeRun([scored("test", 0.8)])

    its, launcher = trainer(tmp_path, script)
    taken: list[int] = []
    score_networks(map(network, range(3)), "test", its, lambda record, _: taken.append(record.number))
    assert taken == [0, 1, 2]
    assert [task.job.seed for task in launcher.tasks] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(("says", "tries"), [(killed, 2), (failed, 1)])
def test_a_scoring_without_a_result_says_which_trial_and_that_nothing_is_lost(
    tmp_path: Path, says: Callable[[], object], tries: int
) -> None:
    its, launcher = trainer(tmp_path, lambda task: FakeRun([says()]))  # type: ignore[list-item]
    with pytest.raises(
        UserError, match=r"trial 7 could not be scored on test: .*the same command scores again"
    ):
        score_one(*network(7), "test", its)
    assert len(launcher.tasks) == tries


def test_ctrl_c_ends_the_scorings(tmp_path: Path) -> None:
    its, launcher = trainer(tmp_path, lambda task: FakeRun([], ends=False))

    def networks() -> Iterator[tuple[TrialRecord, Job]]:
        yield network(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_networks(networks(), "test", its, lambda *_: None, side_by_side=2)
    assert [run.kills for run in launcher.runs] == [1]
