"""Limits of serving: forward time, size and FLOPs, judged before a candidate trains, and learned by samplers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from command_line import SMALL, Run
from records import bare, changed

from dhen.errors import UserError
from dhen.schema import FeatureSchema, Table
from search.config import check_directory, read_study_config
from search.execution.attempts import study_parallelism
from search.read_study import read_study
from search.samplers.ask_tell import Proposals
from search.samplers.context import CandidatePricer, evenly
from search.selection import pick
from spaces.space import load_space
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.trial_record import Outcome, TrialKind, TrialRecord

LIMITS = ("serving.max_flops=3000", "serving.max_bytes=10KiB", "serving.max_ms=1e6", "serving.batch=64")
FEATURES = FeatureSchema(tables=(Table(name="c0", rows=100), Table(name="c1", rows=100)), numeric=("n0",))


@pytest.fixture(scope="module")
def limited(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three candidates, some of which are over a limit."""
    out = tmp_path_factory.mktemp("limited") / "study"
    dhen_search("run", "--data", click_log, "--out", out, "trials=3", "sampler=random", *SMALL, *LIMITS)
    return out


def test_what_is_over_a_limit_is_not_trained(limited: Path) -> None:
    record = read_study(limited)
    refused = [trial for trial in record.candidates if trial.result.outcome is Outcome.INFEASIBLE]
    assert 0 < len(refused) < len(record.candidates)
    for trial in record.trials:
        over = trial.job.flops > 3_000 or trial.job.weights_bytes > 10 * 1024
        assert (trial.plan.serving_excess > 0) == over
        assert (trial in refused) == (over and trial.kind is TrialKind.CANDIDATE)
        assert bool(trial.attempts) == (trial.plan.serving_ms is not None) == (trial not in refused)
        assert trial.plan.serving_ms is None or trial.plan.serving_ms > 0
    words = " ".join(trial.result.error for trial in refused)
    assert "FLOPs per example, over serving.max_flops=3,000" in words
    assert "over serving.max_bytes=10 KiB" in words
    weights = limited / "trials" / f"{record.front[-1]:05d}" / "weights.safetensors"
    whole = record.trial(record.front[-1]).job.weights_bytes
    assert whole < weights.stat().st_size < whole + 8192


def test_readers_and_the_bundle_say_how_long_a_request_takes(dhen_search: Run, limited: Path) -> None:
    page = (limited / "report.html").read_text()
    assert "64 rows, 1 thread: max_ms=1,000,000, max_bytes=10 KiB, max_flops=3,000" in page
    assert "ms forward" in page
    forward = json.loads((limited / "best" / "bundle.json").read_text())["forward"]
    assert forward["ms"] > 0
    assert (forward["batch"], forward["threads"]) == (64, 1)
    verified = dhen_search("verify", limited / "best").stdout
    assert verified.count(f"ms for 64 rows, 1 thread ({forward['machine']})") == 2
    assert "; at export " in verified


def test_a_study_that_finds_nothing_says_how_fast_the_fastest_was(
    dhen_search: Run, click_log: Path, tmp_path: Path
) -> None:
    words = ("trials=1", *SMALL, "serving.max_ms=1e-6")
    said = dhen_search("run", "--data", click_log, "--out", tmp_path / "s", *words).stdout
    assert "No candidate meets the limits of serving" in said
    assert "the fastest takes" in said
    record = read_study(tmp_path / "s")
    assert {trial.result.outcome for trial in record.candidates} == {Outcome.INFEASIBLE}
    assert record.trials[0].plan.serving_ms > 0
    assert record.trials[0].result.outcome is Outcome.COMPLETED
    resumed = read_study_config(tmp_path / "s" / "study.yaml", ["serving.max_ms=1"])
    with pytest.raises(UserError, match=r"holds another study \(serving"):
        check_directory(tmp_path / "s", resumed)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("serving.max_ms=0", "greater than 0"),
        ("serving.max_ms=.inf", "finite"),
        ("serving.max_flops=-1", "greater than 0"),
        ("serving.max_bytes=0", "greater than 0"),
        ("serving.max_bytes=-3MiB", "at least 0"),
        ("serving.max_bytes=many", "80GiB"),
        ("serving.batch=0", "greater than 0"),
        ("serving.maxms=5", "Did you mean 'serving.max_ms'"),
    ],
)
def test_limits_that_are_none(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_study_config(None, [word])


def test_the_wall_clock_needs_quiet() -> None:
    """With several threads candidates train one at a time."""
    undisturbed = study_parallelism(read_study_config(None, ["serving.threads=2", "parallel=3", "threads=1"]))
    assert undisturbed.side_by_side == 3
    words = ["serving.threads=2", "serving.max_ms=5"]
    assert study_parallelism(read_study_config(None, [*words, "threads=1"])).side_by_side == 1
    with pytest.raises(UserError, match="give parallel=1"):
        study_parallelism(read_study_config(None, [*words, "parallel=2"]))


def test_picks_by_forward_time() -> None:
    front = [bare(n, ne=0.9 - n / 10, flops=10.0**n, serving_ms=ms) for n, ms in enumerate((0.5, 3.0, 1.0))]
    assert pick(front, "ms<=0.7").number == 0
    assert pick(front, "ms <= 1.0").number == 2
    with pytest.raises(UserError, match=r"fastest on the front takes 0\.5 ms"):
        pick(front, "ms<=0.1")
    with pytest.raises(UserError, match="no forward time on the front is known"):
        pick([bare(0, ne=0.9, flops=1.0)], "ms<=1")


def judged(number: int, limits: Limits, asked: Proposals, pricer: CandidatePricer) -> TrialRecord:
    """A proposal with its excess, its forward time by its FLOPs, and a made-up NE where it meets the limits."""
    point, notes = asked.ask(number, {})
    found = pricer.price(point)
    assert found is not None
    ms = found.flops / 1000
    demands = limits.demands(
        flops=found.flops, weights_bytes=found.weights_bytes, table_bytes=found.table_bytes, ms=ms
    )
    excess = max(demand.excess for demand in demands)
    record = bare(number, ne=Random(number).uniform(0.7, 0.8), flops=found.flops, point=point)
    record = changed(record, serving_ms=ms, serving_excess=excess, memory_excess=-0.5, sampler_notes=notes)
    return record if excess <= 0 else record.with_result(outcome=Outcome.INFEASIBLE, validation=None)


@pytest.mark.parametrize("sampler", ["gp", "nsga2", "tpe"])
def test_samplers_learn_the_limits_and_remember_them(sampler: str) -> None:
    """A resumed study proposes what an undisturbed one would, with both constraints."""
    limits = Limits(serving=ServingConfig(max_ms=4.0))
    pricer = CandidatePricer(load_space("tiny"), FEATURES, lambda _: True, limits)
    asked = Proposals(sampler=sampler, seed=5, pricer=pricer)
    records: list[TrialRecord] = []
    for number in range(11):  # GP begins at ten
        record = judged(number, limits, asked, pricer)
        asked.tell(record)
        records.append(record)
    resumed = Proposals(sampler=sampler, seed=5, pricer=pricer)
    resumed.remember(TrialRecord.model_validate_json(each.model_dump_json()) for each in records)
    assert resumed.ask(11, {}) == asked.ask(11, {})
    assert any(record.result.outcome is Outcome.INFEASIBLE for record in records)


def test_the_ranker_draws_only_what_meets_size_and_flops() -> None:
    space = load_space("tiny")
    free = CandidatePricer(space, FEATURES, lambda _: True)
    limits = Limits(serving=ServingConfig(max_flops=2000, max_bytes=8000))
    bound = CandidatePricer(space, FEATURES, lambda _: True, limits)
    for pricer in (free, bound):
        drawn = list(islice(evenly(pricer, set(), Random(0), {}), 30))
        within = [each.flops <= 2000 and each.weights_bytes <= 8000 for each in drawn]
        assert all(within) == (pricer is bound)
        assert drawn
    impossible = CandidatePricer(space, FEATURES, lambda _: True, Limits(serving=ServingConfig(max_flops=1)))
    assert list(evenly(impossible, set(), Random(0), {})) == []


def test_the_ranker_learns_the_forward_time() -> None:
    """Of its proposals, fewer are too slow once it has seen some."""
    limits = Limits(serving=ServingConfig(max_ms=2.0))
    pricer = CandidatePricer(load_space("tiny"), FEATURES, lambda _: True, limits)
    asked = Proposals(sampler="ranker", seed=1, pricer=pricer)
    slow = []
    for number in range(24):
        record = judged(number, limits, asked, pricer)
        asked.tell(record)
        slow.append(record.result.outcome is Outcome.INFEASIBLE)
    assert sum(slow[:8]) >= 5
    assert sum(slow[8:]) <= 16 / 2
