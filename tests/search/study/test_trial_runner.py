"""What becomes of a study's trials, whatever their processes do: outcomes, next attempts, equal jobs, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

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
    trained,
)
from priced import JOB
from records import judged
from records import trial as made_up

from search.config import StudyConfig
from search.execution.admission import Admission, AdmittedTrial
from search.execution.attempts import Execution
from search.execution.budget import Budget
from search.execution.reduce_events import AttemptContext, reduce_event, with_attempt
from search.execution.trainer import Trainer, new_record
from search.samplers.stopping import Judge, Stop
from search.study.reuse import EarlierResults, WarmStart, WinnerWeights
from search.study.trial_runner import SearchPolicy, TrialRunner
from search.study_state import StudyState
from spaces.space import load_space
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.records.events import Event, FailureEvent, SlowRank
from trials.records.job import Job
from trials.records.serving_limits import Limits
from trials.records.strategy import Strategy
from trials.records.trial_record import MOVED, Outcome, TrialKind, TrialRecord
from trials.store.database import sqlite_url
from trials.store.ledger import Ledger, StudySetting

pytestmark = pytest.mark.usefixtures("unsynced")
ONE_RANK = load_cluster("a100-80gb").with_ranks("1x1")
DIES = {Outcome.INTERRUPTED: killed, Outcome.OUT_OF_MEMORY: out_of_memory}
NO_EARLIER_STUDIES = WarmStart(EarlierResults(), load_space("tiny"), lambda candidate: pytest.fail("unused"))


def job(seed: int = 0) -> Job:
    """Equal seeds are equal jobs."""
    return JOB.replace(seed=seed)


class WatchedLedger(Ledger):
    """Remembers what was saved; `before` and `after` may interrupt."""

    def __init__(self, path: Path) -> None:
        super().__init__(sqlite_url(path / "study.db"), "study")
        self.saved: list[TrialRecord] = []
        self.before: Callable[[TrialRecord], None] = lambda record: None
        self.after: Callable[[TrialRecord], None] = lambda record: None

    def save(self, record: TrialRecord) -> None:
        self.before(record)
        super().save(record)
        self.saved.append(record)
        self.after(record)


class FakeProposals:
    """Hears what a sampler would be told."""

    def __init__(self) -> None:
        self.told: list[TrialRecord] = []

    def note(self, record: TrialRecord) -> None:
        pass

    def tell(self, record: TrialRecord) -> None:
        self.told.append(record)


class Study:
    """A runner on fake processes; all else is real. `script` gives the run of a job's attempt."""

    def __init__(
        self,
        directory: Path,
        script: Callable[[int, int], FakeRun],
        *,
        side_by_side: int = 2,
        cluster: Cluster | None = None,
        rule: Judge = lambda record, trials: None,
        on_look: Callable[[Study], None] = lambda study: None,
    ) -> None:
        """`script` is given the seed of the job and the number of the attempt; `on_look` may interrupt."""
        self.ledger = WatchedLedger(directory)
        described = (cluster or ONE_RANK).to_dict()
        self.ledger.settle(
            StudySetting(directory="", log="l", features={}, seed=0, version=2, cluster=described)
        )
        self.state = StudyState(judged([]), self.ledger.trials(), observers=[lambda _: on_look(self)])
        self.launcher = FakeLauncher(lambda task: script(task.job.seed, task.attempt))
        execution = Execution(cluster)
        trainer = Trainer(
            self.launcher, _Log(directory), directory, threads=1, precision="fp32", execution=execution
        )
        self.admission = Admission(
            clusters=[cluster or ONE_RANK],
            execution=execution,
            limits=Limits(),
            measure_ms=lambda *_: 1.0,
            trials=self.ledger.trials(),
        )
        parts = SimpleNamespace(
            ledger=self.ledger,
            state=self.state,
            trainer=trainer,
            admission=self.admission,
            weights=WinnerWeights(directory, self.state, NO_EARLIER_STUDIES),
            warm_start=NO_EARLIER_STUDIES,
            budget=Budget(StudyConfig(), self.state, spent=False),
            side_by_side=side_by_side,
        )
        self.runner = TrialRunner(parts)  # type: ignore[arg-type]
        self.proposals = FakeProposals()
        self.decisions = SearchPolicy(self.proposals, rule, self.state)  # type: ignore[arg-type]

    def upcoming(self, *jobs: Job) -> Iterator[AdmittedTrial]:
        """Candidates, or what was cut short of them, with plans."""
        for number, each in enumerate(jobs):
            known = self.state.trials.get(number)
            if known is None or known.result.outcome.unfinished:
                yield self.admission.admit(new_record(number, TrialKind.CANDIDATE, {}, each), each, known)

    def train(self, *jobs: Job) -> list[TrialRecord]:
        """The trials as the ledger has them afterwards; broken off by Ctrl-C as a driver breaks off."""
        try:
            self.runner.train(self.upcoming(*jobs), self.decisions)
        except KeyboardInterrupt:
            self.ledger.before = self.ledger.after = lambda record: None
            self.runner.break_off(resumable=True)
        assert not self.launcher.alive
        return self.ledger.trials()

    @property
    def ends(self) -> list[tuple[int, Outcome]]:
        """What was saved as ended, in that order."""
        each = [(record.number, record.result.outcome) for record in self.ledger.saved]
        return [(number, outcome) for number, outcome in each if not outcome.unfinished]


class _Log:
    """All that a trainer asks of a log before a process reads it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def runs(*attempts: list[Event]) -> Callable[[int, int], FakeRun]:
    """The same for all jobs: each attempt says this at once and ends."""
    return lambda seed, attempt: FakeRun(attempts[attempt])


def going_on() -> FakeRun:
    return FakeRun([progress(10)], ends=False)


def outcomes(trials: list[TrialRecord]) -> list[Outcome]:
    return [trial.result.outcome for trial in trials]


def tries(trial: TrialRecord) -> list[Outcome]:
    return [attempt.outcome for attempt in trial.attempts]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ([evaluated(10, 0.9), trained(0.9)], Outcome.COMPLETED),
        ([evaluated(10, 0.9), diverged()], Outcome.DIVERGED),
        ([failed()], Outcome.FAILED),
        ([out_of_memory()], Outcome.OUT_OF_MEMORY),
    ],
)
def test_a_trial_ends_as_its_processes_say_and_is_recorded_and_told_once(
    tmp_path: Path, said: list[Event], outcome: Outcome
) -> None:
    study = Study(tmp_path, runs(said))
    (trial,) = study.train(job())
    assert study.ends == [(0, outcome)]
    assert (trial.result.outcome, tries(trial)) == (outcome, [outcome])
    assert trial.attempts[0].strategy == "dp"
    assert trial.attempts[0].executed == trial.result.technique == ("dp" if len(said) > 1 else None)
    assert trial.result.seconds is not None
    assert [record.result.outcome for record in study.proposals.told] == [outcome]
    assert study.state.trials[0].result == trial.result


def test_the_ledger_has_each_change_before_anybody_is_told(tmp_path: Path) -> None:
    study = Study(tmp_path, runs([evaluated(10, 0.9), trained(0.9)]))
    told_before: list[Outcome] = []

    def before(record: TrialRecord) -> None:
        if record in study.proposals.told or study.state.trials.get(record.number) == record:
            told_before.append(record.result.outcome)

    study.ledger.before = before
    study.train(job())
    assert told_before == []
    assert study.ends == [(0, Outcome.COMPLETED)]


def test_a_trial_that_is_given_up_has_one_attempt_and_its_processes_are_ended(tmp_path: Path) -> None:
    def rule(record: TrialRecord, trials: Any) -> Stop | None:
        return Stop("hopeless", 0.8) if len(record.result.curve) == 2 else None

    looks = [[evaluated(10, 0.9)], [evaluated(20, 0.8)]]
    study = Study(tmp_path, lambda *_: FakeRun(*looks, ends=False), rule=rule)
    (trial,) = study.train(job())
    assert study.ends == [(0, Outcome.STOPPED)]
    assert tries(trial) == [Outcome.STOPPED]
    assert (trial.result.expected_ne, trial.result.error) == (0.8, "hopeless")
    assert study.launcher.runs[0].kills == 1


@pytest.mark.parametrize("last", [trained(0.7), failed(), killed(), out_of_memory(), diverged()])
def test_what_a_rule_gives_up_is_given_up_whether_its_end_is_heard_with_it_or_later(
    tmp_path: Path, last: Event
) -> None:
    """How much is heard at once depends on the moment; the trial, its attempts and what the sampler learns do
    not."""

    def rule(record: TrialRecord, trials: Any) -> Stop | None:
        return Stop("hopeless", 0.8) if len(record.result.curve) == 2 else None

    points: list[Event] = [evaluated(examples, 0.9) for examples in (10, 20, 30)]
    found = []
    for name, looks in (("early", [[point] for point in points]), ("late", [[*points, last]])):
        (tmp_path / name).mkdir()
        study = Study(tmp_path / name, lambda *_, looks=looks: FakeRun(*looks), rule=rule)
        (trial,) = study.train(job())
        assert study.ends == [(0, Outcome.STOPPED)]
        assert len(study.launcher.tasks) == 1
        assert tries(trial) == [Outcome.STOPPED]
        found.append(trial.result.replace(seconds=None))
    assert found[0] == found[1]
    assert len(found[0].curve) == 2


def test_what_is_killed_is_tried_once_more_and_not_twice(tmp_path: Path) -> None:
    study = Study(tmp_path, runs([killed()], [trained()]))
    (trial,) = study.train(job())
    assert tries(trial) == [Outcome.INTERRUPTED, Outcome.COMPLETED]
    assert trial.result.outcome is Outcome.COMPLETED
    assert [task.attempt for task in study.launcher.tasks] == [0, 1]


KILLED = FailureEvent(error="rank 1 was killed by signal 9 (SIGKILL)", killed=True)


def after(record: TrialRecord, event: FailureEvent) -> TrialRecord:
    return with_attempt(
        reduce_event(record, event), event, 1.0, AttemptContext(Strategy(), counted=False, planned_here=True)
    )


def test_what_is_killed_a_second_time_is_blamed_on_memory() -> None:
    record = made_up(3, Random(0)).with_result(outcome=Outcome.RUNNING, technique="dp")
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
    stopped = FailureEvent(error="rank 1 stopped", stopped=True)
    assert after(record, stopped).result.outcome is Outcome.INTERRUPTED
    assert after(after(record, stopped), stopped).result.outcome is Outcome.FAILED
    assert (
        after(record, FailureEvent(error="full", out_of_memory=True)).result.outcome is Outcome.OUT_OF_MEMORY
    )
    assert after(record, FailureEvent(error="wrong")).result.outcome is Outcome.FAILED


def test_what_is_moved_does_not_count_as_killed(tmp_path: Path) -> None:
    slow = SlowRank(rank=1, times=9.6, examples=50, seconds=6.0, where="node a", then=MOVED, moves=True)
    moved = [slow, FailureEvent(error=slow.words, slow=True)]
    study = Study(tmp_path, runs(moved, moved, [killed()], [trained()]))
    (trial,) = study.train(job())
    assert tries(trial) == [*[Outcome.INTERRUPTED] * 3, Outcome.COMPLETED]
    assert [attempt.was_moved for attempt in trial.attempts] == [True, True, False, False]
    assert [attempt.slow_rank for attempt in trial.attempts] == [slow.words, slow.words, None, None]
    assert study.state.notices.count(f"trial 0: {slow.words}") == 2


def test_who_is_slow_and_stays_is_in_the_attempt(tmp_path: Path) -> None:
    slow = SlowRank(rank=1, times=9.6, examples=50, seconds=6.0, then="and trains on")
    study = Study(tmp_path, lambda *_: FakeRun([slow], [trained()]))
    (trial,) = study.train(job())
    (attempt,) = trial.attempts
    assert (attempt.outcome, attempt.slow_rank) == (Outcome.COMPLETED, slow.words)


def test_of_two_equal_jobs_side_by_side_the_second_waits_and_shares_the_result(tmp_path: Path) -> None:
    study = Study(tmp_path, lambda *_: FakeRun([progress(1)], [progress(2)], [trained(0.7)]))
    first, second = study.train(job(), job())
    assert len(study.launcher.tasks) == 1
    assert (first.origin.reused_from, second.origin.reused_from) == (None, 0)
    assert second.result == first.result.taken_over()
    assert second.attempts == ()
    assert study.ends == [(0, Outcome.COMPLETED), (1, Outcome.COMPLETED)]
    assert [record.number for record in study.proposals.told] == [0, 1]


def test_of_two_equal_jobs_the_second_shares_what_has_ended_before_it_came_up(tmp_path: Path) -> None:
    study = Study(tmp_path, runs([trained(0.7)]), side_by_side=1)
    _, second = study.train(job(), job())
    assert len(study.launcher.tasks) == 1
    assert second.origin.reused_from == 0


@pytest.mark.parametrize("said", [failed(), diverged(), out_of_memory()])
def test_where_the_first_of_three_equal_jobs_fails_the_second_trains_and_the_third_shares(
    tmp_path: Path, said: Event
) -> None:
    ends = iter([[said], [trained(0.7)]])
    study = Study(tmp_path, lambda *_: FakeRun([progress(1)], [progress(2)], next(ends)))
    first, second, third = study.train(job(), job(), job())
    assert first.result.outcome is not Outcome.COMPLETED
    assert (second.result.outcome, second.origin.reused_from) == (Outcome.COMPLETED, None)
    assert third.origin.reused_from == 1
    assert [record.number for record in study.ledger.saved].count(2) == 2  # as it began to wait, as it ended
    assert len(study.launcher.tasks) == 2
    assert study.launcher.most_at_once == 1


def test_as_many_wait_as_there_are_places_and_no_more(tmp_path: Path) -> None:
    """A sampler that proposes the same again and again would be asked without end."""
    begun: list[int] = []
    study = Study(
        tmp_path,
        lambda *_: FakeRun(*[[progress(look)] for look in range(9)], [trained()]),
        on_look=lambda study: begun.append(0 if study.state.ended else len(study.state.trials)),
    )
    trials = study.train(*[job()] * 9)
    assert max(begun) == 1 + 2
    assert outcomes(trials) == [Outcome.COMPLETED] * 9


def test_those_that_needed_no_training_count_once_each_until_one_trains(tmp_path: Path) -> None:
    study = Study(tmp_path, lambda *_: FakeRun([progress(1)], [progress(2)], [progress(3)], [trained()]))
    study.train(job(), job(), job())
    assert study.runner.fruitless == 2
    study.runner.train(study.upcoming(*[job()] * 3, job(7)), study.decisions)
    assert study.runner.fruitless == 0


def test_a_budget_that_ends_lets_what_runs_end(tmp_path: Path) -> None:
    """The next attempt of a trial that has begun is part of it."""
    study = Study(tmp_path, lambda seed, attempt: FakeRun([progress(1)], [[killed()], [trained()]][attempt]))
    asked: list[int] = []

    def until_the_budget_ends() -> Iterator[AdmittedTrial]:
        for record, its in study.upcoming(*map(job, range(9))):
            if study.launcher.tasks:  # spent as soon as one trains
                asked.append(record.number)
                return
            yield record, its

    study.runner.train(until_the_budget_ends(), study.decisions)
    (trial,) = study.ledger.trials()
    assert tries(trial) == [Outcome.INTERRUPTED, Outcome.COMPLETED]
    assert asked == [1]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def once(condition: Callable[[Study], bool]) -> Callable[[Study], None]:
    def look(study: Study) -> None:
        if condition(study):
            interrupt()

    return look


def test_ctrl_c_leaves_what_runs_and_what_waits_to_be_trained_again(tmp_path: Path) -> None:
    study = Study(tmp_path, lambda *_: going_on(), on_look=once(lambda study: len(study.state.trials) == 2))
    trials = study.train(job(), job())
    assert outcomes(trials) == [Outcome.INTERRUPTED] * 2
    assert [run.kills for run in study.launcher.runs] == [1]
    assert study.ends == []
    assert study.proposals.told == []
    assert [tries(trial) for trial in trials] == [[], []]

    resumed = Study(tmp_path, runs([trained(0.7)]))
    first, second = resumed.train(job(), job())
    assert (first.result.outcome, second.origin.reused_from) == (Outcome.COMPLETED, 0)
    assert len(resumed.launcher.tasks) == 1


def test_ctrl_c_between_the_first_commit_of_a_trial_and_its_start_leaves_none_running(tmp_path: Path) -> None:
    study = Study(tmp_path, lambda *_: going_on())
    study.ledger.after = lambda record: record.number == 1 and interrupt()  # type: ignore[assignment]
    trials = study.train(job(0), job(1))
    assert outcomes(trials) == [Outcome.INTERRUPTED] * 2
    assert len(study.launcher.tasks) == 1
    assert study.state.trials[1].result.outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_a_result_is_kept_records_it_once_or_not_at_all(tmp_path: Path, moment: str) -> None:
    study = Study(tmp_path, lambda seed, _: going_on() if seed else FakeRun([progress(1)], [trained()]))
    setattr(study.ledger, moment, lambda record: record.result.outcome is Outcome.COMPLETED and interrupt())
    first, second = study.train(job(0), job(1))
    assert second.result.outcome is Outcome.INTERRUPTED
    assert study.launcher.runs[1].kills == 1
    if moment == "after":
        assert (first.result.outcome, tries(first)) == (Outcome.COMPLETED, [Outcome.COMPLETED])
    else:
        assert (first.result.outcome, tries(first)) == (Outcome.INTERRUPTED, [])
    assert len([number for number, _ in study.ends if number == 0]) <= 1

    resumed = Study(tmp_path, runs([trained()]))
    assert outcomes(resumed.train(job(0), job(1))) == [Outcome.COMPLETED] * 2
    assert len(resumed.launcher.tasks) == (1 if moment == "after" else 2)


def both_end_at_one_look(second: FailureEvent | Any) -> Callable[[int, int], FakeRun]:
    """Both have begun at the second look, and end there."""
    return lambda seed, attempt: (
        FakeRun([], [trained()]) if seed == 0 else FakeRun([second]) if attempt == 0 else going_on()
    )


def test_ctrl_c_keeps_the_result_of_another_that_has_ended_at_the_same_look(tmp_path: Path) -> None:
    study = Study(tmp_path, both_end_at_one_look(trained(0.7)))
    study.ledger.after = lambda record: record.result.outcome is Outcome.COMPLETED and interrupt()  # type: ignore[assignment]
    trials = study.train(job(0), job(1))
    assert outcomes(trials) == [Outcome.COMPLETED] * 2
    assert [tries(trial) for trial in trials] == [[Outcome.COMPLETED]] * 2


@pytest.mark.parametrize("outcome", sorted(DIES))
def test_ctrl_c_takes_no_next_attempt_from_a_trial_whose_last_one_ended_at_that_look(
    tmp_path: Path, outcome: Outcome
) -> None:
    study = Study(tmp_path, both_end_at_one_look(DIES[outcome]()), cluster=ONE_RANK)
    study.ledger.after = lambda record: record.result.outcome is Outcome.COMPLETED and interrupt()  # type: ignore[assignment]
    _, second = study.train(job(0), job(1))
    assert (second.result.outcome, tries(second)) == (Outcome.INTERRUPTED, [outcome])

    resumed = Study(tmp_path, runs([], [trained()]), cluster=ONE_RANK)
    _, second = resumed.train(job(0), job(1))
    assert tries(second) == [outcome, Outcome.COMPLETED]
    assert (second.result.technique == "dp") == (outcome is Outcome.INTERRUPTED)
    (task,) = resumed.launcher.tasks
    assert (task.attempt, task.strategy.name) == (1, second.result.technique)
