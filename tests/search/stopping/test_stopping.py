"""Stopping: rules on curves whose end is known, and studies by the command line that stop candidates."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from command_line import Run
from fake_processes import PLANNED_ELSEWHERE, FakeLauncher, FakeRun, evaluated, scored, trained
from records import bare, changed

from dhen.errors import UserError
from dhen.schema import FeatureSchema
from search.config import read_study_config
from search.read_study import read_study
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer
from search.samplers.stopping import FEWEST, RULES, Judge, Stop, first_stop, forecast, stopping_rule
from search.selection import pareto_front
from search.study.open_study import open_study
from search.study.trial_runner import SearchPolicy
from search.study_state import StudyState
from spaces.space import load_space
from trials.data.prepared_log import PreparedLog
from trials.records.study_record import StudyRecord
from trials.records.task import Task
from trials.records.trial_record import CurvePoint, Outcome, TrialKind, TrialRecord

EVALUATIONS = 9
GOOD = (0.0003, 0.0004, 0.0005, 0.0007, 0.001, 0.002, 0.003, 0.005)
"""Learning rates, one for each candidate that has to have finished before any is stopped."""
SPACE = {
    "modules": {"dcn_v2": {"layers": 1}},
    "slots": 1,
    "depth": 1,
    "out_embeddings": 2,
    "raw_numeric": False,
    "ensemble": ["concat", "sum", "weighted_sum"],
    "training": {"learning_rate": [1.0e-5, 2.0e-5, 5.0e-5, 1.0e-4, *GOOD, 1.0e30]},
    "start": [
        {"training.learning_rate": rate, "layer.ensemble": ensemble}
        for rate, ensemble in (
            *((rate, "concat") for rate in GOOD),
            (1e-5, "concat"),
            (1e-5, "sum"),
            (1e30, "sum"),
        )
    ],
}
"""One network. It learns at the good rates, hardly at a low one, which has a twin, and diverges at the last."""
CANDIDATES = 1 + len(SPACE["start"])
"""The first is as near to the baseline as there is one."""
WORDS = (
    "sampler=random",
    "baseline_trials=1",
    "training.epochs=3",
    "training.evaluate_every=1000",
    "stopping=curve",
)


def curve(*ne: float) -> tuple[CurvePoint, ...]:
    return tuple(evaluated(1000 * n, each, epoch=0.1 * n).point for n, each in enumerate(ne, 1))


def finished(number: int, *ne: float, flops: float = 1e5, **more: Any) -> TrialRecord:
    return bare(number, ne=min(ne), flops=flops, curve=curve(*ne), **more)


def running(trial: TrialRecord, evaluations: int = EVALUATIONS - 1) -> TrialRecord:
    """As it was after so many evaluations."""
    seen = trial.result.curve[:evaluations]
    return trial.with_result(outcome=Outcome.RUNNING, validation=None, curve=seen)


def made_up(number: int, rng: random.Random, noise: float) -> TrialRecord:
    """Larger models end lower; each falls from its own height by its own rate, and drops at the end."""
    flops = 10 ** rng.uniform(4.0, 7.0)
    end = 0.80 - 0.01 * math.log10(flops) + abs(rng.gauss(0.0, 0.02))
    height, rate = rng.uniform(0.02, 0.10), rng.uniform(0.5, 0.7)
    ne = [end + height * rate**step + 0.01 + rng.gauss(0.0, noise) for step in range(EVALUATIONS - 1)]
    return finished(number, *ne, end + rng.gauss(0.0, noise), flops=flops)


def stopped_of(name: str, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The candidates as they end one after the other."""
    ended: list[TrialRecord] = []
    for trial in trials:
        ended.append(first_stop(RULES[name], running(trial), 0, ended) or trial)
    return ended


def test_the_bound_holds_as_often_as_it_says() -> None:
    rng = random.Random(0)
    below = count = 0
    for _ in range(60):
        trials = [made_up(number, rng, noise=0.002) for number in range(40)]
        for known in (8, 15, 39):
            for seen in (1, 3, 8):
                expected = forecast(running(trials[known], seen), trials[:known])
                final = trials[known].result.validation
                assert final is not None
                below += final.ne < expected.low
                count += 1
    assert 0.02 <= below / count <= 0.08


def test_curves_on_a_clean_set_stop_the_dominated_and_no_other() -> None:
    rng = random.Random(1)
    trials = [made_up(number, rng, noise=0.0) for number in range(60)]
    ended = stopped_of("curve", trials)
    stopped = [trial for trial in ended if trial.result.outcome is Outcome.STOPPED]
    assert len(stopped) > 15
    assert [trial.number for trial in pareto_front(ended)] == [trial.number for trial in pareto_front(trials)]
    for trial in stopped:
        assert trial.result.error is not None
        assert f"stopped at {trial.result.curve[-1].examples:,} examples" in trial.result.error
        assert trial.result.validation == trial.result.curve[-1].validation
        assert trial.result.expected_ne is not None
        whole = trials[trial.number].result.validation
        assert whole is not None
        assert trial.result.expected_ne == pytest.approx(whole.ne, abs=0.05)


def test_curves_are_not_stopped_where_none_with_no_more_flops_is_better() -> None:
    known = [finished(n, 0.90 + 0.01 * n, 0.80 + 0.01 * n, 0.70 + 0.01 * n) for n in range(10)]
    hopeless = finished(10, 1.0, 0.9, 0.8)
    stop = RULES["curve"](running(hopeless, 1), known)
    assert stop is not None
    assert stop.expected_ne == pytest.approx(0.8)
    assert "trial 0 has 0.70000 at 1 times its FLOPs" in stop.reason
    assert RULES["curve"](running(hopeless.with_job(flops=9e4), 1), known) is None


@pytest.mark.parametrize("judge", RULES.values())
def test_none_is_stopped_before_some_have_finished(judge: Judge) -> None:
    """The baseline's trials, twins, those trained by another schedule and those that ended there do not count."""
    bad = running(finished(50, 0.99, 0.98, 0.97), 1)
    few = [finished(n, 0.80 + 0.01 * n, 0.75 + 0.01 * n, 0.70 + 0.01 * n) for n in range(FEWEST - 1)]
    others = [
        finished(20, 0.8, 0.7, kind=TrialKind.BASELINE),
        finished(21, 0.8, 0.7, reused_from=0),
        finished(22, 0.8, 0.7, training={"epochs": 2}),
        finished(23, 0.8),
    ]
    assert judge(bad, few + others) is None
    assert isinstance(judge(bad, [*few, finished(24, 0.8, 0.7)]), Stop)


@pytest.mark.parametrize("name", RULES)
def test_what_arrives_at_once_is_judged_like_what_arrives_alone(name: str) -> None:
    rng = random.Random(2)
    trials = [made_up(number, rng, noise=0.001) for number in range(40)]
    for position in range(20, 40):
        known, candidate = trials[:position], trials[position]
        alone = None
        for seen in range(1, EVALUATIONS):
            alone = alone or first_stop(RULES[name], running(candidate, seen), seen - 1, known)
        assert first_stop(RULES[name], running(candidate), 0, known) == alone


def test_one_that_ends_by_itself_is_let_be() -> None:
    known = [finished(n, *[0.70 + 0.01 * n] * 4) for n in range(10)]
    patient, over = (
        running(finished(10, 0.9, 0.91, 0.92, 0.93, training={"patience": each}), 3) for each in (3, 2)
    )
    assert first_stop(RULES["curve"], patient, 2, [k.with_job(training={}) for k in known])
    assert first_stop(RULES["curve"], over, 2, known) is None


def fresh_proposals(records: Sequence[TrialRecord] = ()) -> Proposals:
    """A sampler of a space after these candidates."""
    pricer = CandidatePricer(load_space("tiny"), FeatureSchema(numeric=("n0", "n1")), lambda _: True)
    proposals = Proposals(sampler="tpe", seed=0, pricer=pricer)
    proposals.remember(records)
    return proposals


def test_a_resumed_sampler_knows_stopped_candidates_as_the_one_before() -> None:
    live = fresh_proposals()
    records = []
    for number in range(24):
        point, notes = live.ask(number, {})
        record = changed(
            finished(number, 0.9, 0.8 + 0.001 * (number % 5)),
            point=point,
            sampler_notes=notes,
            flops=1e5 + number,
        )
        if number % 3 == 0:
            record = record.with_result(outcome=Outcome.STOPPED, expected_ne=0.7 + 0.01 * number)
        live.tell(record)
        records.append(TrialRecord.model_validate_json(record.model_dump_json()))
    assert fresh_proposals(records).ask(24, {}) == live.ask(24, {})


def test_an_unknown_rule_is_told_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'curve'\?.*auto, curve, none"):
        stopping_rule("curv")


@pytest.mark.parametrize("written", [False, True])
def test_the_rule_that_was_removed_is_told_with_what_works(
    dhen_search: Run, tmp_path: Path, written: bool
) -> None:
    """On the command line, and in a study.yaml of before."""
    (tmp_path / "study.yaml").write_text("stopping: rungs\n" if written else "{}\n")
    said = dhen_search("run", tmp_path, *(() if written else ("stopping=rungs",)), code=2).stderr
    assert "stopping: the rule 'rungs' was removed: curve ends candidates early, none" in " ".join(
        said.split()
    )


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("space") / "rates.yaml"
    path.write_text(yaml.safe_dump(SPACE))
    return f"space={path}"


@pytest.fixture(scope="module")
def stopped(dhen_search: Run, click_log: Path, space: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that stops some of its candidates."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    words = (*WORDS, space, f"trials={CANDIDATES}", "parallel=1", "threads=1")
    dhen_search("run", "--data", click_log, "--out", out, *words)
    return out


def of_outcome(record: StudyRecord, outcome: Outcome) -> list[TrialRecord]:
    return [trial for trial in record.trials if trial.result.outcome is outcome]


def test_a_study_stops_what_cannot_reach_the_front(dhen_search: Run, stopped: Path) -> None:
    record = read_study(stopped)
    given_up = of_outcome(record, Outcome.STOPPED)
    assert len(record.candidates) == CANDIDATES
    assert record.finished
    assert given_up
    own = [trial for trial in given_up if trial.origin.reused_from is None]
    least = min(p.examples for t in of_outcome(record, Outcome.COMPLETED) for p in t.result.curve[-1:])
    for trial in own:
        assert trial.kind is TrialKind.CANDIDATE
        assert trial.number not in record.front
        assert [attempt.outcome for attempt in trial.attempts] == [Outcome.STOPPED]
        assert 0 < trial.result.curve[-1].examples < least
        assert not (stopped / "trials" / f"{trial.number:05d}" / "weights.safetensors").exists()
    said = dhen_search("status", stopped).stdout
    assert "stopped early" in said
    assert f"{len(own)} {'candidate was' if len(own) == 1 else 'candidates were'} stopped early" in (
        " ".join((stopped / "report.html").read_text().split())
    )
    with sqlite3.connect(stopped / "mlflow.db") as connection:
        tags = connection.execute("select count(*) from tags where key = 'outcome' and value = 'stopped'")
        assert tags.fetchone()[0] == len(given_up)
    connection.close()


def test_a_twin_of_a_stopped_one_is_stopped_too(stopped: Path) -> None:
    record = read_study(stopped)
    twins = [trial for trial in of_outcome(record, Outcome.STOPPED) if trial.origin.reused_from is not None]
    assert twins
    for twin in twins:
        first = record.trial(twin.owner)
        assert first.result.outcome is Outcome.STOPPED
        assert (twin.result.curve, twin.result.error, twin.result.expected_ne) == (
            first.result.curve,
            first.result.error,
            first.result.expected_ne,
        )
        assert twin.attempts == ()


def test_a_loss_that_diverges_ends_its_candidate_alone(stopped: Path) -> None:
    (diverged,) = of_outcome(read_study(stopped), Outcome.DIVERGED)
    assert diverged.job.training["learning_rate"] == 1e30
    assert "at step" in str(diverged.result.error)


def by_rate(task: Task) -> FakeRun:
    """A training whose NE falls by more, the nearer its learning rate is to 0.001."""
    if task.score_split is not None:
        return FakeRun([scored(task.score_split)])
    worth = 0.1 / (1.0 + abs(math.log10(task.job.training.learning_rate / 0.001)))
    nes = [0.9 - worth * (1 - 0.5**step) for step in range(1, 7)]
    looks = [[evaluated(1000 * step, ne)] for step, ne in enumerate(nes, 1)]
    return FakeRun(*looks, [trained(nes[-1])])


def fake_study(folder: Path, log: PreparedLog, space: str, *words: str) -> StudyRecord:
    """A study on fake processes."""
    folder.mkdir(exist_ok=True)
    config = read_study_config(None, [*PLANNED_ELSEWHERE, *WORDS, space, *words])
    return open_study(config, folder, log, FakeLauncher(by_rate)).run()


@pytest.mark.usefixtures("unsynced")
def test_a_resumed_study_decides_alike_and_one_with_two_at_a_time_stops_some_too(
    log: PreparedLog, space: str, tmp_path: Path
) -> None:
    whole = fake_study(tmp_path / "whole", log, space, "trials=24")
    first = of_outcome(whole, Outcome.STOPPED)[0].number
    assert of_outcome(fake_study(tmp_path / "resumed", log, space, f"trials={first}"), Outcome.STOPPED)
    resumed = fake_study(tmp_path / "resumed", log, space, "trials=24")
    assert [decided(trial) for trial in resumed.trials] == [decided(trial) for trial in whole.trials]

    beside = fake_study(tmp_path / "beside", log, space, "trials=20", "parallel=2")
    assert {trial.result.outcome for trial in beside.trials} == {Outcome.COMPLETED, Outcome.STOPPED}
    owners = [trial.job.fingerprint for trial in beside.candidates if not trial.shared]
    assert len(owners) == len(set(owners))


def decided(trial: TrialRecord) -> tuple[object, ...]:
    return (
        trial.point,
        trial.result.outcome,
        trial.result.error,
        trial.result.expected_ne,
        trial.origin.reused_from,
        len(trial.result.curve),
    )


def test_what_was_judged_before_a_candidate_was_cut_short_is_not_judged_again() -> None:
    """It goes on and tells its whole curve once more; meanwhile others have ended that would have stopped it."""
    candidate = finished(50, *[0.9] * 6)
    known = {n: finished(n, *[0.80 + 0.001 * n] * 6) for n in range(20)}
    rule = RULES["curve"]
    assert first_stop(rule, running(candidate, 4), 0, [*known.values()]) is not None

    def decided(earlier: TrialRecord) -> TrialRecord | None:
        state = SimpleNamespace(trials={**known, 50: earlier})
        decisions = SearchPolicy(cast("Proposals", None), rule, cast("StudyState", state))
        begun = candidate.with_result(outcome=Outcome.RUNNING, validation=None, curve=())
        assert decisions.stopped(running(candidate, 2), begun) is None or not earlier.result.curve
        return decisions.stopped(running(candidate, 4), running(candidate, 2))

    cut_short = running(candidate, 5).with_result(outcome=Outcome.INTERRUPTED)
    assert decided(cut_short) is None
    fresh = candidate.with_result(outcome=Outcome.INTERRUPTED, validation=None, curve=())
    assert decided(fresh) is not None
