"""Retrainings on fake processes: trained, tried again, scored where asked; what is done is not done twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_processes import (
    FakeLauncher,
    FakeRun,
    diverged,
    evaluated,
    failed,
    killed,
    out_of_memory,
    progress,
    scored,
    trained,
)
from priced import JOB

from dhen.errors import UserError
from search.execution.attempts import Execution
from search.execution.retraining import RetrainingRequest, Retrainings, Watcher
from search.execution.trainer import Trainer, new_record
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.data.prepared_log import PreparedLog
from trials.records.events import Event
from trials.records.task import Task
from trials.records.trial_record import Outcome, TrialKind, TrialRecord
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger, StudySetting

pytestmark = pytest.mark.usefixtures("unsynced")
CLUSTER = {"name": "small", "hosts": 1, "gpus_per_host": 1, "hbm": 1}
WINNER = new_record(0, TrialKind.CANDIDATE, {}, JOB).with_result(outcome=Outcome.COMPLETED, technique="dp")


def wanted(seed: int) -> RetrainingRequest:
    return RetrainingRequest(WINNER, JOB.replace(seed=seed))


class Session:
    """A session on one run directory; `script` gives the run of a task."""

    def __init__(
        self, directory: Path, script: Callable[[Task], FakeRun], cluster: Cluster | None = None
    ) -> None:
        self.ledger = Ledger(sqlite_url(directory / "study.db"), "study")
        self.ledger.settle(
            StudySetting(directory="", log="l", features={}, seed=0, version=2, cluster=CLUSTER)
        )
        self.ledger.save(WINNER)
        self.launcher = FakeLauncher(script)
        log = PreparedLog(directory, manifest=None)  # type: ignore[arg-type]
        trainer = Trainer(
            self.launcher, log, directory, threads=1, precision="fp32", execution=Execution(cluster)
        )
        self.ended: list[int] = []
        self.retrainings = Retrainings(
            self.ledger, trainer, side_by_side=2, watcher=Watcher(changed=self._changed)
        )

    def _changed(self, record: TrialRecord, ended: bool) -> None:
        self.ended += [record.job.seed] if ended else []

    @property
    def tasks(self) -> list[tuple[int, str]]:
        return [(task.job.seed, "score" if task.score_split else "train") for task in self.launcher.tasks]


def well(task: Task) -> FakeRun:
    if task.score_split:
        return FakeRun([scored(task.score_split, 0.8)])
    return FakeRun([progress(1)], [evaluated(10, 0.9), trained(0.9)])


def says(*training: Event) -> Callable[[Task], FakeRun]:
    return lambda task: well(task) if task.score_split else FakeRun([training[task.attempt]])


def test_each_is_trained_then_scored_and_each_look_at_test_counts(tmp_path: Path) -> None:
    session = Session(tmp_path, well)
    found = session.retrainings.run([wanted(1), wanted(2), wanted(1)], score="test")
    assert sorted(session.tasks) == [(seed, what) for seed in (1, 2) for what in ("score", "train")]
    assert [record.result.test.ne for record in found.values() if record.result.test] == [0.8, 0.8]
    assert session.ledger.test_looks() == 2
    assert sorted(session.ended) == [1, 2]
    assert session.ledger.retrainings() == sorted(found.values(), key=lambda record: record.number)
    assert session.launcher.most_at_once == 2


def test_what_is_done_is_not_done_again_by_a_later_session(tmp_path: Path) -> None:
    Session(tmp_path, well).retrainings.run([wanted(1)])
    again = Session(tmp_path, well)
    assert len(again.retrainings.run([wanted(1), wanted(2)])) == 2
    assert again.tasks == [(2, "train")]


def test_weights_that_are_wanted_and_gone_are_trained_again(tmp_path: Path) -> None:
    Session(tmp_path, well).retrainings.run([wanted(1)])
    with_weights = Session(tmp_path, well)
    with_weights.retrainings.run([wanted(1)], weights=True)
    assert with_weights.tasks == []
    for weights in tmp_path.rglob("weights.safetensors"):
        weights.unlink()
    without = Session(tmp_path, well)
    without.retrainings.run([wanted(1)], weights=True)
    assert without.tasks == [(1, "train")]


def test_what_was_killed_is_tried_once_more(tmp_path: Path) -> None:
    session = Session(tmp_path, says(killed(), trained()))
    (record,) = session.retrainings.run([wanted(1)]).values()
    assert [attempt.outcome for attempt in record.attempts] == [Outcome.INTERRUPTED, Outcome.COMPLETED]


def test_what_runs_out_of_memory_climbs_and_keeps_the_plan_of_each_attempt(tmp_path: Path) -> None:
    session = Session(tmp_path, says(out_of_memory(), trained()), load_cluster("a100-80gb").with_ranks("1x1"))
    (record,) = session.retrainings.run([wanted(1)]).values()
    first, second = record.attempts
    assert (first.outcome, second.outcome) == (Outcome.OUT_OF_MEMORY, Outcome.COMPLETED)
    assert first.strategy == "dp"
    assert second.strategy == second.executed == record.plan.technique != "dp"
    assert second.plan is not None
    assert (second.plan.strategy, second.plan.ran_out) == (second.strategy, ("dp",))
    assert record.plan.memory_excess is not None
    assert record.plan.memory_excess <= 0.0  # what fits is no worse for what did not
    assert session.ledger.retrainings() == [record]


@pytest.mark.parametrize(("end", "tried_again"), [(failed(), True), (diverged(), False)])
def test_what_ended_without_a_result_is_told_and_trained_again_where_it_may_end_otherwise(
    tmp_path: Path, end: Event, tried_again: bool
) -> None:
    session = Session(tmp_path, says(end))
    assert session.retrainings.run([wanted(1)], score="test") == {}
    (told,) = session.retrainings.failures([wanted(1)])
    assert told.startswith("trial 0 with seed 1: ")
    assert session.ledger.test_looks() == 0
    later = Session(tmp_path, well)
    assert len(later.retrainings.run([wanted(1)])) == int(tried_again)
    assert len(later.tasks) == int(tried_again)


def test_ctrl_c_while_one_trains_keeps_what_has_ended(tmp_path: Path) -> None:
    """The other is trained by the same command, under its own number."""

    def script(task: Task) -> FakeRun:
        return well(task) if task.job.seed == 1 else FakeRun([progress(1)], ends=False)

    session = Session(tmp_path, script)
    real = session.retrainings.watcher.changed

    def changed(record: TrialRecord, ended: bool) -> None:
        real(record, ended)
        if ended:
            raise KeyboardInterrupt

    session.retrainings.watcher = Watcher(changed=changed)
    with pytest.raises(KeyboardInterrupt):
        session.retrainings.run([wanted(1), wanted(2)])
    assert session.launcher.alive == []
    later = Session(tmp_path, well)
    assert len(later.retrainings.run([wanted(1), wanted(2)])) == 2
    assert later.tasks == [(2, "train")]
    assert [record.number for record in later.ledger.retrainings()] == [0, 1]


def test_what_was_cut_short_between_training_and_scoring_is_scored_alone(tmp_path: Path) -> None:
    def script(task: Task) -> FakeRun:
        if task.score_split:
            raise KeyboardInterrupt
        return well(task)

    with pytest.raises(KeyboardInterrupt):
        Session(tmp_path, script).retrainings.run([wanted(1)], score="test")
    later = Session(tmp_path, well)
    assert len(later.retrainings.run([wanted(1)], score="test")) == 1
    assert later.tasks == [(1, "score")]
    assert later.ledger.test_looks() == 2  # the first may have been seen


@pytest.mark.parametrize("split", ["validation", "test"])
def test_what_cannot_be_scored_is_said_and_scored_alone_later(tmp_path: Path, split: str) -> None:
    session = Session(tmp_path, lambda task: FakeRun([failed()]) if task.score_split else well(task))
    with pytest.raises(UserError, match=f"could not be scored on {split}"):
        session.retrainings.run([wanted(1)], score=split)
    later = Session(tmp_path, well)
    later.retrainings.run([wanted(1)], score=split)
    assert later.tasks == [(1, "score")]


def test_a_network_takes_as_long_to_serve_from_another_seed(tmp_path: Path) -> None:
    winner = WINNER.with_plan(serving_ms=2.5)
    whole = RetrainingRequest(winner, JOB.replace(seed=1))
    part = RetrainingRequest(winner, JOB.replace(seed=2), removed="layer0.dcn_v2")
    done = Session(tmp_path, well).retrainings.run([whole, part])
    assert [record.plan.serving_ms for record in done.values()] == [2.5, None]
