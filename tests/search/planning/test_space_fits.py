"""Whether anything in a space fits, where some of its candidates cannot be planned at all."""

from __future__ import annotations

import pytest
from priced import JOB

from dhen.errors import UserError
from dhen.schema import Table
from dhen.values import parse
from search.execution.passes import excludes_decay_of_tables
from search.execution.plan_trial import check_some_fit, plan_of
from search.samplers.context import CandidatePricer
from spaces.space import Candidate, load_space
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.plan import Plan

CLUSTER = load_cluster("a100-80gb").with_ranks("1x1")
PRICER = CandidatePricer(load_space("tiny", JOB.features), JOB.features, lambda candidate: True)


def refused(candidate: Candidate) -> Plan:
    raise UserError("training.batch_size=2 is less than one example for each of 4 ranks")


def test_a_candidate_that_cannot_be_planned_does_not_speak_for_the_space() -> None:
    asked: list[Candidate] = []

    def plan(candidate: Candidate) -> Plan:
        asked.append(candidate)
        return refused(candidate) if len(asked) == 1 else plan_of(JOB, CLUSTER)

    check_some_fit(PRICER, CLUSTER, plan)
    assert len(asked) == 2


def test_where_none_can_be_planned_the_reason_is_said() -> None:
    with pytest.raises(UserError, match="less than one example for each of 4 ranks"):
        check_some_fit(PRICER, CLUSTER, refused)


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
