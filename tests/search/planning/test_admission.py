"""Who may train, and how: a new trial as planned, one that was cut short with its next attempt; whether anything
in a space fits, if some of its candidates cannot be planned at all."""

from __future__ import annotations

from typing import Any

import pytest
from priced import JOB
from records import bare

from dhen.errors import UserError
from dhen.schema import Table
from dhen.values import parse
from search.execution.admission import Admission
from search.execution.attempts import Execution
from search.execution.passes import excludes_decay_of_tables
from search.execution.plan_trial import check_some_fit, plan_of
from search.execution.trainer import new_record
from search.samplers.context import CandidatePricer
from spaces.space import Candidate, load_space
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.plan import Plan
from trials.records.serving_limits import Limits, ServingConfig
from trials.records.trial_record import Attempt, Outcome, Result, TrialKind, TrialRecord
from trials.training.embeddings.requirements import UnfitShardError

ONE_RANK = load_cluster("a100-80gb").with_ranks("1x1").replace(device="cpu")


def admission(
    *trials: TrialRecord, cluster: Cluster = ONE_RANK, executed: bool = True, **serving: Any
) -> Admission:
    return Admission(
        clusters=[cluster],
        execution=Execution(cluster if executed else None),
        limits=Limits(serving=ServingConfig(**serving)),
        measure_ms=lambda *_: 5.0,
        trials=trials,
    )


def fresh(number: int = 3, kind: TrialKind = TrialKind.CANDIDATE) -> TrialRecord:
    return new_record(number, kind, {}, JOB)


def cut_short(outcome: Outcome, **facts: Any) -> TrialRecord:
    """The trial as an earlier session left it in the attempt that followed this one."""
    attempt = Attempt(strategy="dp", outcome=outcome, **({"predicted_bytes": None} | facts))
    known = fresh().replace(attempts=(attempt,)).with_origin(started_at="2026-03-01T00:00:00+00:00")
    return known.with_plan(technique="dp").with_result(outcome=Outcome.INTERRUPTED, error="Ctrl-C")


def test_a_new_trial_trains_as_planned() -> None:
    record, job = admission().admit(fresh(), JOB)
    assert job is JOB
    assert record.result == Result()
    assert record.plan.technique == "dp"
    assert record.plan.summary is not None


def test_what_fits_nowhere_has_ended_and_the_baseline_trains_all_the_same() -> None:
    small = ONE_RANK.with_hbm(1000)
    record, job = admission(cluster=small).admit(fresh(), JOB)
    assert (record.result.outcome, job) == (Outcome.INFEASIBLE, None)
    record, job = admission(cluster=small).admit(fresh(kind=TrialKind.BASELINE), JOB)
    assert (record.result.outcome, job) == (Outcome.RUNNING, JOB)


def test_what_is_over_a_limit_of_serving_has_ended_with_its_plan() -> None:
    record, job = admission(max_ms=4.0).admit(fresh(), JOB)
    assert (record.result.outcome, job) == (Outcome.INFEASIBLE, None)
    assert record.plan.serving_ms == 5.0
    assert record.plan.summary is not None


def test_a_trial_that_was_killed_goes_on_as_it_was() -> None:
    known = cut_short(Outcome.INTERRUPTED)
    record, job = admission().admit(fresh(), JOB, known)
    assert job is JOB
    assert record == known.replace(result=Result())


def test_a_trial_that_ran_out_of_memory_goes_on_with_the_next_technique() -> None:
    known = cut_short(Outcome.OUT_OF_MEMORY)
    record, _ = admission().admit(fresh(), JOB, known)
    assert record.attempts == known.attempts
    assert record.origin == known.origin
    assert record.result == Result()
    assert record.plan.technique not in ("dp", None)


@pytest.mark.parametrize("executed", [True, False])
def test_a_trial_that_was_cut_short_in_its_first_attempt_is_planned_anew(executed: bool) -> None:
    known = cut_short(Outcome.INTERRUPTED).replace(attempts=())
    record, _ = admission(executed=executed).admit(fresh(), JOB, known)
    assert record.attempts == ()
    assert record.plan.summary is not None


def test_what_ran_out_of_memory_makes_later_plans_leave_as_much_room() -> None:
    """In this session and in those that follow; of this trial itself its ladder knows."""
    before = admission()
    free = before.plan(JOB)
    assert free.best is not None
    need = free.best.memory.total
    short = cut_short(Outcome.OUT_OF_MEMORY, predicted_bytes=need, needed_bytes=need + 12_345)
    before.next_attempt(short, JOB)
    for later in (before, admission(short)):
        found = later.plan(JOB)
        assert found.best is not None
        assert found.best.memory == free.best.memory.replace(margin=12_345)
        margins = {priced.strategy.held_as: priced.memory.margin for priced in found.strategies}
        assert {held_as for held_as, margin in margins.items() if margin} == {"dp"}


def test_the_room_that_is_left_never_shrinks() -> None:
    its = admission()
    for missing in (500, 20):
        short = cut_short(Outcome.OUT_OF_MEMORY, predicted_bytes=100, needed_bytes=100 + missing)
        its.next_attempt(short, JOB)
    assert its.plan(JOB).best.memory.margin == 500  # type: ignore[union-attr]


def test_what_another_study_has_trained_is_judged_without_a_measurement() -> None:
    calls: list[Any] = []
    its = Admission(
        clusters=[ONE_RANK],
        execution=Execution(),
        limits=Limits(serving=ServingConfig(max_flops=1.0, max_ms=1.0)),
        measure_ms=lambda *given: calls.append(given) or 5.0,
        trials=[bare(0, ne=0.9, flops=1.0)],
    )
    record = its.admit_by_size(fresh(), JOB)
    assert record.result.outcome is Outcome.INFEASIBLE
    assert record.plan.technique == "dp"
    assert calls == []


def test_a_candidate_whose_tables_no_kernel_takes_is_infeasible_and_the_study_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: object) -> None:
        raise UnfitShardError("table 'site': a shard of 6 columns")

    monkeypatch.setattr(Execution, "check", refuses)
    record, job = admission().admit(fresh(), JOB)
    assert (record.result.outcome, job) == (Outcome.INFEASIBLE, None)
    assert record.result.error == "table 'site': a shard of 6 columns"
    assert admission().admit_by_size(fresh(), JOB).result.outcome is Outcome.INFEASIBLE
    cut = fresh().with_result(outcome=Outcome.INTERRUPTED)
    record, job = admission().admit(fresh(), JOB, cut)
    assert (record.result.outcome, job) == (Outcome.INFEASIBLE, None)


PRICER = CandidatePricer(load_space("tiny", JOB.features), JOB.features, lambda candidate: True)


def refused(candidate: Candidate) -> Plan:
    raise UserError("training.batch_size=2 is less than one example for each of 4 ranks")


def test_a_candidate_that_cannot_be_planned_does_not_speak_for_the_space() -> None:
    asked: list[Candidate] = []

    def plan(candidate: Candidate) -> Plan:
        asked.append(candidate)
        return refused(candidate) if len(asked) == 1 else plan_of(JOB, ONE_RANK)

    check_some_fit(PRICER, ONE_RANK, plan)
    assert len(asked) == 2


def test_where_none_can_be_planned_the_reason_is_said() -> None:
    with pytest.raises(UserError, match="less than one example for each of 4 ranks"):
        check_some_fit(PRICER, ONE_RANK, refused)


@pytest.mark.parametrize(("hbm", "technique"), [("1GiB", None), ("3MiB", "dp+host_tables"), ("8KiB", None)])
def test_a_decay_that_keeps_tables_on_the_device_is_left_out_if_they_need_another_tier(
    hbm: str, technique: str | None
) -> None:
    """On a device with room for them, and on one without room for a batch, it is in nobody's way."""
    sizes = {"hbm": hbm, "host_memory_bytes": "64GB"}
    speeds = {"memory_bandwidth": "1TB/s", "peak_flops": {"fp32": "1TFLOP/s", "bf16": "1TFLOP/s"}}
    ranks = {"hosts": 1, "gpus_per_host": 1, "device": "cpu", "host_link_bandwidth": "20GB/s"}
    cluster = parse(Cluster, ranks | sizes | speeds, "test")
    large = JOB.features.replace(tables=(Table(name="c0", rows=200_000),))
    job = JOB.replace(features=large)
    assert excludes_decay_of_tables(job, lambda one: plan_of(one, cluster)) == technique
