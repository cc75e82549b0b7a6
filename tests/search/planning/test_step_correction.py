"""Predicted seconds corrected by trainings that have ended here: fitted, kept, shown, and no part of a choice."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
from priced import JOB

from search.execution import step_correction
from search.execution.admission import Admission
from search.execution.attempts import Execution
from search.execution.later_stages import planned_seconds
from search.execution.plan_trial import plan_of
from search.execution.step_correction import ENOUGH, MOST, SPREAD, StepCorrections, TimedStep, fitted
from search.execution.trainer import new_record
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions
from trials.records.serving_limits import Limits
from trials.records.strategy import Prefer
from trials.records.trial_record import Attempt, Outcome, TrialKind, TrialRecord

CPU = load_cluster("a100-80gb").with_ranks("1x2").replace(device="cpu", memory_bandwidth=1e10)
HERE = StepCorrections((CPU,), threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DHEN_SEARCH_CACHE", str(tmp_path))
    return tmp_path / "step-times"


def timed(count: int, noise: float = 0.0) -> list[TimedStep]:
    """Steps that take 20 ms, three times the seconds of operations, and 5 ns a byte, as a machine has them that is
    not always as slow."""
    rng = Random(1)
    found = []
    for _ in range(count):
        operations, traffic = rng.uniform(1e-3, 2e-2), 10 ** rng.uniform(6, 8)
        seconds = (0.02 + 3 * operations + 5e-9 * traffic) * math.exp(rng.gauss(0.0, noise))
        found.append(
            TimedStep(operations=operations, traffic=traffic, seconds=seconds, precision="fp32", threads=1)
        )
    return found


@pytest.mark.parametrize("bandwidth", [1e9, 5e9])
def test_what_steps_take_is_found_again_however_fast_the_memory_was_found_to_be(bandwidth: float) -> None:
    correction = fitted(timed(40), bandwidth)
    others = timed(60)[40:]
    for step in others:
        items = {"operations": step.operations, "forward": step.traffic / bandwidth}
        assert correction.seconds(items) == pytest.approx(step.seconds, rel=0.1)


def test_fewer_are_drawn_to_the_roofline_and_say_how_unsure_they_are() -> None:
    none, one, three, many = (fitted(timed(count), 5e9) for count in (0, 1, 3, 40))
    assert none.seconds({"forward": 2.0, "all_reduce": 1.0, "hidden": 0.5, "total": 2.5}) == 2.5
    (step,) = timed(1)
    roofline = {"operations": step.operations, "forward": step.traffic / 5e9}
    assert sum(roofline.values()) < one.seconds(roofline) < step.seconds
    assert SPREAD == none.spread > one.spread > three.spread > many.spread > 1.0
    assert "no training with as many ranks has been measured on this machine so far" in none.words
    assert "corrected by 1 training measured on this machine so far." in one.words
    assert "corrected by 40 trainings measured on this machine." in many.words


def admitted(number: int = 1) -> TrialRecord:
    execution = Execution(CPU, corrections=HERE)
    its = Admission(
        clusters=[CPU], execution=execution, limits=Limits(), measure_ms=lambda *_: 5.0, trials=()
    )
    return its.admit(new_record(number, TrialKind.CANDIDATE, {}, JOB), JOB)[0]


def trained(times: float, *, ends: int = 1, by: StepCorrections = HERE) -> None:
    """Notes trainings whose steps took so many times as long as the roofline says."""
    record = admitted()
    assert record.plan.summary is not None
    roofline = record.plan.summary.whole_step_seconds
    assert roofline is not None
    attempt = Attempt(
        strategy="dp",
        outcome=Outcome.COMPLETED,
        plan=record.plan.summary,
        predicted_bytes=None,
        measured_step_seconds=times * roofline,
    )
    for _ in range(ends):
        by.note(record.replace(attempts=(attempt,)))


def test_a_training_that_has_ended_corrects_the_plans_that_follow() -> None:
    before = admitted()
    trained(3.0, ends=ENOUGH)
    after = admitted()
    assert before.plan.summary == after.plan.summary, "what is kept of a plan is the roofline's"
    assert before.plan.step_seconds is not None
    assert after.plan.step_seconds == pytest.approx(3.0 * before.plan.step_seconds, rel=0.01)
    # minutes are divided by what is known now, whenever a trial was planned
    assert planned_seconds(before, HERE) == planned_seconds(after, HERE) != planned_seconds(before)


@pytest.mark.parametrize("prefer", ["least", "fastest"])
def test_no_correction_changes_which_strategy_is_chosen(prefer: Prefer) -> None:
    def chosen() -> tuple[str | None, list[str], float]:
        options = PlanOptions(prefer=prefer)
        shown = HERE.of_plan(plan_of(JOB, CPU, options))
        assert shown.best is not None
        ranked = sorted(shown.strategies, key=lambda priced: priced.time.total)
        return admitted().plan.technique, [each.strategy.name for each in ranked], shown.best.time.total

    technique, ranked, seconds = chosen()
    trained(0.01, ends=ENOUGH)
    trained(100.0, ends=3 * ENOUGH)
    technique_then, ranked_then, seconds_then = chosen()
    assert (technique_then, ranked_then) == (technique, ranked)
    assert seconds_then > 10 * seconds


def test_the_newest_are_kept_and_a_damaged_file_is_begun_anew(cache: Path) -> None:
    trained(2.0)
    (file,) = cache.iterdir()
    text = file.read_text()
    kept = step_correction.TimedSteps.model_validate_json(text)
    assert kept.key[-1] == "1x2"
    file.write_text(kept.replace(steps=kept.steps * MOST).model_dump_json())
    trained(7.0)
    steps = step_correction.TimedSteps.model_validate_json(file.read_text()).steps
    assert len(steps) == MOST
    assert steps[-1].seconds == pytest.approx(3.5 * steps[-2].seconds)
    for damaged in ("{", text.replace('"seconds": ', '"seconds": -')):
        file.write_text(damaged)
        assert HERE.correction("1x2", "fp32").trainings == 0
        trained(2.0)
        assert HERE.correction("1x2", "fp32").trainings == 1


def test_ranks_precision_and_threads_are_told_apart() -> None:
    precision = JOB.training.precision
    other = "bf16" if precision == "fp32" else "fp32"
    two = StepCorrections((CPU,), threads=2)
    trained(2.0, ends=ENOUGH)
    assert HERE.correction("1x1", precision).trainings == 0
    assert HERE.correction("1x2", other).trainings == ENOUGH, (
        "those in another precision are better than none"
    )
    assert two.correction("1x2", precision).trainings == ENOUGH
    trained(2.0, ends=ENOUGH + 1, by=two)
    assert two.correction("1x2", precision).trainings == ENOUGH + 1
    assert HERE.correction("1x2", precision).trainings == ENOUGH


def test_a_cache_that_cannot_be_written_ends_nothing(cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    trained(2.0)
    assert HERE.correction("1x2", "fp32").trainings == 0
