"""What is killed from outside is tried again, once as it was; then as if memory had been short."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from random import Random

import pytest
import records

from search.config import read_study_config
from search.dataset import open_log
from search.execution.jobs import trained_job
from search.execution.reduce_events import AttemptContext, reduce_event, with_attempt
from search.execution.scoring import score_one
from search.execution.trainer import Trainer
from search.read_study import read_study
from trials.events import Failed
from trials.processes.launcher import Launcher, Run
from trials.processes.task import Task
from trials.record import Outcome, TrialKind, TrialRecord
from trials.strategy import Strategy

KILLED = Failed(error="rank 1 was killed by signal 9 (SIGKILL)", killed=True)


def after(record: TrialRecord, event: Failed) -> TrialRecord:
    return with_attempt(
        reduce_event(record, event), event, 1.0, AttemptContext(Strategy(), counted=False, planned_here=True)
    )


def test_the_second_time_memory_is_blamed() -> None:
    record = records.trial(3, Random(0), kind=TrialKind.CANDIDATE).with_result(
        outcome=Outcome.RUNNING, technique="dp"
    )
    once = after(record, KILLED)
    assert (once.result.outcome, once.result.error) == (Outcome.INTERRUPTED, KILLED.error)
    twice = after(once, KILLED)
    assert [attempt.outcome for attempt in twice.attempts] == [Outcome.INTERRUPTED, Outcome.OUT_OF_MEMORY]
    left = KILLED.replace(host_left=True)
    many = record
    for _ in range(10):
        many = after(many, left)
        assert many.result.outcome is Outcome.INTERRUPTED
    assert after(many, left).result.outcome is Outcome.OUT_OF_MEMORY
    stopped = Failed(error="rank 1 stopped", stopped=True)
    assert after(record, stopped).result.outcome is Outcome.INTERRUPTED
    assert after(after(record, stopped), stopped).result.outcome is Outcome.FAILED
    assert after(record, Failed(error="full", out_of_memory=True)).result.outcome is Outcome.OUT_OF_MEMORY
    assert after(record, Failed(error="wrong")).result.outcome is Outcome.FAILED


class KillsTheFirst(Launcher):
    """Its first process dies at once."""

    killed = False

    def start(self, task: Task, directory: Path) -> Run:
        before = set(multiprocessing.active_children())
        run = super().start(task, directory)
        if not self.killed:
            self.killed = True
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
        return run


def test_a_killed_scoring_has_a_second_try(
    study: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", environment["DHEN_SEARCH_CACHE"])  # the log is prepared there
    record, log = read_study(study), open_log(read_study_config(study / "study.yaml", []))
    baseline, launcher = record.trial(record.baseline or 0), KillsTheFirst()
    shutil.copytree(study, tmp_path / "copy")
    trainer = Trainer(launcher, log, tmp_path / "copy", threads=1)
    assert score_one(baseline, trained_job(baseline, log), "test", trainer) == baseline.result.test
    assert launcher.killed
