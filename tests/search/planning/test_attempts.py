"""What follows an attempt that ended badly: the same once more, the next technique, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from priced import GIB, JOB, priced
from records import bare

from dhen.errors import UserError
from dhen.model import parse_model
from search.config import read_study_config
from search.execution import attempts as planning
from search.execution.attempts import (
    Execution,
    execution,
    learnt_margins,
    next_strategy,
    plan_options,
    ranks_here,
)
from search.execution.plan_trial import plan_of
from search.execution.step_correction import StepCorrections
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions, PricedStrategy
from trials.planner.plan import Plan
from trials.records.job import Job
from trials.records.strategy import named
from trials.records.trial_record import Attempt, Outcome, Result, TrialRecord

MEMORY = 100 * GIB
ONE_RANK = load_cluster("a100-80gb").with_ranks("1x1")


def rung(name: str, total: int, seconds: float = 1.0, *, fits: bool = True) -> PricedStrategy:
    """A strategy with this name, of this many bytes."""
    made = priced(named(name), MEMORY)
    empty = {key: 0 for key in type(made.memory).model_fields if isinstance(getattr(made.memory, key), int)}
    memory = made.memory.replace(**empty).replace(parameters=total)
    return made.replace(memory=memory, time=made.time.replace(total=seconds), fits=fits)


def planned(*rungs: PricedStrategy) -> Plan:
    return Plan(
        cluster="made up",
        hosts=1,
        gpus_per_host=2,
        hbm=MEMORY,
        verified=False,
        batch_size=64,
        examples_per_rank=32,
        precision="fp32",
        chosen=rungs[0].strategy,
        strategies=rungs,
        lacking_bytes=0,
        remedy=None,
        faster=None,
        notes=(),
    )


def tried(strategy: str, outcome: Outcome = Outcome.OUT_OF_MEMORY, **facts: Any) -> Attempt:
    return Attempt(strategy=strategy, outcome=outcome, **({"predicted_bytes": None} | facts))


def name_of(found: PricedStrategy | None) -> str | None:
    return found.strategy.name if found else None


def test_the_next_strategy_has_the_fewest_techniques_of_those_that_need_less() -> None:
    ladder = planned(
        rung("dp", 100),
        rung("fsdp+full_checkpointing", 10, 0.1),
        rung("fsdp", 60, 3.0),
        rung("zero1", 90, 2.0),
    )
    assert name_of(next_strategy(ladder, (tried("dp"),))) == "zero1"


def test_among_as_many_techniques_the_shortest_step_counts() -> None:
    ladder = planned(rung("dp", 100), rung("zero1", 90, 3.0), rung("zero2", 80, 2.0), rung("fsdp", 10, 2.5))
    assert name_of(next_strategy(ladder, (tried("dp"),))) == "zero2"


def test_the_next_strategy_needs_less_than_the_last_by_what_lacked() -> None:
    ladder = planned(rung("dp", 100), rung("zero1", 91), rung("zero2", 90), rung("fsdp", 50))
    assert name_of(next_strategy(ladder, (tried("dp", needed_bytes=210, limit_bytes=200),))) == "zero2"
    assert name_of(next_strategy(ladder, (tried("dp", needed_bytes=211, limit_bytes=200),))) == "fsdp"
    assert next_strategy(ladder, (tried("dp", needed_bytes=251, limit_bytes=200),)) is None


@pytest.mark.parametrize("facts", [{}, {"needed_bytes": 5, "limit_bytes": 9}])
def test_what_says_nothing_of_its_need_moves_on_to_what_needs_less_at_all(facts: dict[str, int]) -> None:
    """A process that the kernel has killed knows no bytes."""
    ladder = planned(rung("dp", 100), rung("zero1", 100), rung("zero2", 99))
    assert name_of(next_strategy(ladder, (tried("dp", **facts),))) == "zero2"


def test_what_does_not_fit_is_not_next() -> None:
    ladder = planned(rung("dp", 100), rung("zero1", 50, fits=False), rung("fsdp+cpu_offload", 40))
    assert name_of(next_strategy(ladder, (tried("dp"),))) == "fsdp+cpu_offload"


NAMES = ("dp", "zero1", "zero2", "fsdp", "fsdp+full_checkpointing", "fsdp+cpu_offload")


@given(st.lists(st.integers(1, 50), min_size=len(NAMES), max_size=len(NAMES)), st.integers(0, 20))
@settings(max_examples=50)
def test_a_climb_ends_and_tries_each_strategy_once_with_falling_need(bytes_: list[int], lacking: int) -> None:
    ladder, needs = planned(*map(rung, NAMES, bytes_)), dict(zip(NAMES, bytes_, strict=True))
    attempts = [tried("dp", needed_bytes=lacking, limit_bytes=0)]
    while (found := next_strategy(ladder, tuple(attempts))) is not None:
        assert needs[found.strategy.name] <= needs[attempts[-1].strategy] - max(lacking, 1)
        attempts.append(tried(found.strategy.name, needed_bytes=lacking, limit_bytes=0))
    names = [attempt.strategy for attempt in attempts]
    assert len(set(names)) == len(names) <= len(NAMES)


def attempted(*attempts: Attempt) -> TrialRecord:
    record = bare(0, ne=0.9, flops=1.0, technique="dp", error="it went wrong", attempts=attempts)
    return record.with_result(outcome=attempts[-1].outcome)


def test_a_margin_is_learnt_for_each_way_to_hold_the_model() -> None:
    """By the worst prediction there; how many micro-batches there were makes no other way."""
    first = attempted(
        tried("dp", predicted_bytes=100, needed_bytes=130),
        tried("zero1", predicted_bytes=90, needed_bytes=95),
    )
    second = attempted(tried("dp+micro_batches=4", predicted_bytes=100, needed_bytes=120))
    assert learnt_margins([first, second]) == learnt_margins([second, first]) == {"dp": 30, "zero1": 5}
    assert learnt_margins([second]) == {"dp": 20}


@pytest.mark.parametrize(
    "attempt",
    [
        tried("dp", predicted_bytes=200, needed_bytes=100),
        tried("dp", predicted_bytes=100),
        tried("dp", needed_bytes=100),
        tried("dp", Outcome.COMPLETED, predicted_bytes=100, measured_bytes=900),
        tried("dp", Outcome.FAILED, predicted_bytes=100, needed_bytes=900),
    ],
    ids=["planned above", "need unknown", "planned elsewhere", "completed", "failed"],
)
def test_no_room_is_left_for_what_says_nothing_of_a_prediction_that_was_too_low(attempt: Attempt) -> None:
    assert learnt_margins([attempted(attempt)]) == {}
    assert learnt_margins([]) == {}


def test_what_was_killed_begins_anew_as_it_was() -> None:
    for cluster in (None, ONE_RANK):
        record = attempted(tried("dp", Outcome.INTERRUPTED)).with_plan(technique="zero1", peak_bytes=7)
        again = Execution(cluster).next_attempt(record, JOB)
        assert again is not None
        assert again.result == Result()
        assert (again.plan, again.attempts, again.job) == (record.plan, record.attempts, record.job)


@pytest.mark.parametrize("outcome", sorted({*Outcome} - {Outcome.INTERRUPTED, Outcome.OUT_OF_MEMORY}))
def test_no_attempt_follows_one_that_ended_otherwise(outcome: Outcome) -> None:
    for cluster in (None, ONE_RANK):
        assert Execution(cluster).next_attempt(attempted(tried("dp", outcome)), JOB) is None


def test_out_of_memory_moves_the_plan_to_the_next_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    ladder = planned(rung("dp", 100), rung("zero1", 60, 2.5))
    monkeypatch.setattr(planning, "plan_of", lambda *given: asked.append(given) or ladder)
    options = PlanOptions(prefer="fastest", memory_margin=-50, learnt={"dp": 3})
    again = Execution(ONE_RANK, options=options).next_attempt(attempted(tried("dp")), JOB)
    assert again is not None
    assert again.result == Result()
    assert (again.plan.technique, again.plan.peak_bytes, again.plan.step_seconds) == ("zero1", 60, 2.5)
    assert asked == [
        (JOB, ONE_RANK, PlanOptions(prefer="fastest", climbing=True))
    ]  # all that fit, those that leave no margin too
    assert again.plan.summary is not None
    assert (again.plan.summary.strategy, again.plan.summary.ran_out) == ("zero1", ("dp",))
    assert Execution(ONE_RANK).strategy(again) == named("zero1")


def test_no_strategy_left_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan_of", lambda *_: planned(rung("dp", 100), rung("zero1", 100)))
    assert Execution(ONE_RANK).next_attempt(attempted(tried("dp")), JOB) is None


def test_one_process_trains_whatever_was_planned_where_plans_are_not_executed() -> None:
    record = bare(0, ne=0.9, flops=1.0).with_plan(technique="fsdp")
    assert Execution().strategy(record).name == "dp"
    assert Execution(ONE_RANK).strategy(record).name == "fsdp"
    assert Execution(ONE_RANK).strategy(record.with_plan(technique=None)).name == "dp"  # the baseline's
    assert Execution().task_fields(record, JOB) == {"strategy": named("dp")}


def test_delayed_updates_are_always_executed_by_what_can_delay_them() -> None:
    """Where plans are not executed, and for the baseline's trials that fit nowhere."""
    record = bare(0, ne=0.9, flops=1.0).with_plan(technique=None)
    delayed = record.replace(job=record.job.replace(training={"delayed_update": True}))
    for execution_ in (Execution(), Execution(ONE_RANK)):
        strategy = execution_.strategy(delayed)
        assert strategy == named("zero_offload")
        assert execution_.task_fields(delayed, JOB)["strategy"] == strategy


def test_ranks_alone_may_fall_silent_for_long() -> None:
    record = bare(0, ne=0.9, flops=1.0)
    sharded = record.with_plan(technique="fsdp", ranks="1x2")
    two = Execution(ONE_RANK, 7, larger=(ONE_RANK.with_ranks("1x2"),)).task_fields(sharded, JOB)
    assert (two["gpus_per_host"], two["hbm"], two["strategy"].name) == (2, 7, "fsdp")
    assert two["deadline_seconds"] == planning.DEADLINE_SECONDS
    assert Execution(ONE_RANK).task_fields(record, JOB)["deadline_seconds"] is None


def test_plans_are_executed_here_and_on_hosts_of_a_launcher_and_a_declared_memory_is_enforced() -> None:
    assert execution(read_study_config(None, ["cluster=zionex"]), ONE_RANK) == Execution()
    corrections = StepCorrections((ONE_RANK,), threads=3)
    here = execution(read_study_config(None, []), ONE_RANK, threads=3)
    assert here == Execution(ONE_RANK, corrections=corrections)
    declared = execution(read_study_config(None, ["hbm=80GiB"]), ONE_RANK, threads=3)
    assert declared == Execution(ONE_RANK, ONE_RANK.hbm, corrections=corrections)
    planned_only = read_study_config(None, ["hbm=80GiB", "enforce_memory=no"])
    assert execution(planned_only, ONE_RANK, threads=3) == here
    undeclared = read_study_config(None, ["enforce_memory=yes"])
    assert execution(undeclared, ONE_RANK, threads=3) == declared
    with pytest.raises(UserError, match=r"enforce_memory=yes .* one process trains here"):
        read_study_config(None, ["cluster=zionex", "enforce_memory=yes"])
    words = ["cluster=zionex", "ranks=2x4", "launcher=ray"]
    assert execution(read_study_config(None, words), ONE_RANK) == Execution(ONE_RANK)
    assert ranks_here(read_study_config(None, words)) == 4
    assert ranks_here(read_study_config(None, ["ranks=2x4"])) == 8
    assert ranks_here(read_study_config(None, ["cluster=zionex", "ranks=2x4"])) == 1


def test_keys_of_a_study_are_what_is_asked_of_its_plans() -> None:
    words = ["prefer=fastest", "technique=full_checkpointing+fsdp", "memory_margin=-2MiB"]
    asked = PlanOptions(
        prefer="fastest", technique=named("fsdp+full_checkpointing"), memory_margin=-2 * 2**20
    )
    assert plan_options(read_study_config(None, words)) == asked
    assert plan_options(read_study_config(None, [])) == PlanOptions()


def climb(job: Job, cluster: Cluster, options: PlanOptions, first: str) -> list[str]:
    """Every strategy that is tried where each attempt runs out of memory by a byte."""
    attempts: tuple[Attempt, ...] = ()
    record: TrialRecord | None = bare(0, ne=0.9, flops=1.0, technique=first)
    while record is not None:
        attempts += (tried(record.plan.technique or "", needed_bytes=1, limit_bytes=0),)
        record = Execution(cluster, options=options).next_attempt(
            record.replace(attempts=attempts).with_result(outcome=Outcome.OUT_OF_MEMORY), job
        )
    return [attempt.strategy for attempt in attempts]


def mlp_job(width: int, layers: int, batch_size: int) -> Job:
    layer = {"modules": [{"kind": "mlp", "mlp": [width, width]}], "out_embeddings": 8}
    model = parse_model({"embedding_dim": 16, "layers": [layer] * layers}, "test")
    return JOB.replace(model=model, training=JOB.training.replace(batch_size=batch_size))


DEEP = mlp_job(512, 4, 4096)
FOUR = load_cluster("a100-80gb").with_ranks("1x4")


@pytest.mark.parametrize(
    "technique", ["tensor2", "pipeline2+zero1", "tensor2+micro_batches=4", "fsdp+selective_checkpointing"]
)
def test_a_climb_keeps_what_is_forced_and_recomputes_more_or_has_more_micro_batches(technique: str) -> None:
    asked = named(technique)
    options = PlanOptions(technique=asked)
    chosen = plan_of(DEEP, FOUR, options).chosen
    assert chosen is not None
    tried_ = [named(name) for name in climb(DEEP, FOUR, options, chosen.name)]
    assert any(strategy.checkpointing == "full" for strategy in tried_)
    assert tried_[-1].micro_batches > asked.micro_batches
    for strategy in tried_:
        kept = strategy.replace(checkpointing="none", micro_batches=1)
        assert kept == asked.replace(checkpointing="none", micro_batches=1)
        assert strategy.micro_batches >= asked.micro_batches
        assert strategy.checkpointing != "none" or asked.checkpointing == "none"


def test_a_climb_goes_over_pipelines_and_split_modules_where_nothing_is_forced() -> None:
    no_offload = FOUR.replace(host_memory_bytes=1)
    small = no_offload.replace(device="cpu")  # whose communicators hold nothing
    over = climb(mlp_job(512, 4, 1024), small, PlanOptions(), "dp")
    assert any(named(name).pipeline > 1 for name in over)
    wide = mlp_job(2**14, 1, 64)
    assert climb(wide, no_offload, PlanOptions(), "dp") == ["dp", "zero1", "shard_grad_op", "tensor4"]


def test_a_level_of_tables_is_known_by_whatever_cache_it_had() -> None:
    """The cache is as large as a plan leaves room for, and a climb's plan has no margins; the next may be a
    smaller cache of the same level."""
    ladder = planned(rung("dp+host_tables=700KiB", 85), rung("dp+ssd_tables=100KiB", 60, 2.0))
    last = tried("dp+host_tables=900KiB", predicted_bytes=110, needed_bytes=120, limit_bytes=100)
    assert name_of(next_strategy(ladder, (last,))) == "dp+host_tables=700KiB"
    again = tried("dp+host_tables=700KiB", predicted_bytes=85, needed_bytes=101, limit_bytes=100)
    assert name_of(next_strategy(ladder, (last, again))) == "dp+ssd_tables=100KiB"
