"""Plans with PowerSGD: what it is offered with, what is said of it, and the bandwidth below which it pays."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.optim.one_bit_adam import low_rank_of
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.planner.pricing import Pricing
from trials.planner.segments import shapes_of
from trials.planner.sentences import worth
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy, named

SCHEMA = FeatureSchema(tables=(Table(name="user", rows=5000),), numeric=("price",))
LAYER = {"modules": [{"kind": "mlp", "mlp": [4096, 4096]}], "out_embeddings": 8}
MODEL = parse_model({"embedding_dim": 32, "layers": [LAYER] * 4}, "test")
ADAMW = TrainingConfig(batch_size=2048, precision="bf16")
POWER = ADAMW.replace(power_sgd_rank=2)


def cluster(gigabits: float, ranks: str = "4x8") -> Cluster:
    found = load_cluster("zionex").with_ranks(ranks)
    assert found.network is not None
    return found.replace(network=found.network.replace(bandwidth=gigabits * 1e9 / 8))


def made(where: Cluster, **options: Any) -> Plan:
    return plan(MODEL, SCHEMA, POWER, where, options=PlanOptions(**options))


def test_it_is_planned_with_dp_alone() -> None:
    for ranks in ("4x8", "1x1"):
        found = made(cluster(100, ranks))
        assert {each.strategy.dense for each in found.strategies} == {"dp"}
        assert not any(each.strategy.model_parallel for each in found.strategies)
    assert any("One rank sends nothing" in note for note in found.notes)
    for technique in ("zero1", "fsdp", "tensor2", "pipeline2", "zero_offload"):
        with pytest.raises(UserError, match=r"power_sgd_rank=2 is planned with dp alone.*Give technique=dp"):
            made(cluster(100), technique=named(technique))


def test_the_step_is_shorter_below_one_bandwidth_and_the_plan_names_it() -> None:
    pricing = Pricing(MODEL, SCHEMA, POWER, cluster(100))
    found, sizes = worth(pricing, Strategy()), low_rank_of(shapes_of(pricing.segments(1)), 2)
    assert found.pays_below is not None
    assert sizes is not None
    below = found.pays_below * 8 / 1e9
    for times, pays in ((0.1, True), (0.9, True), (1.1, False), (10, False)):
        seconds = [
            Pricing(MODEL, SCHEMA, training, cluster(times * below)).time(Strategy()).total
            for training in (POWER, ADAMW)
        ]
        assert (seconds[0] < seconds[1]) == pays
    stated = re.search(
        r"1/(\S+) of gradients .* It pays where the network has less than (\S+) Gb/s",
        " ".join(made(cluster(100)).notes),
    )
    assert stated is not None
    numbers = sum(segment.parameters for segment in pricing.segments(1))
    assert float(stated[1]) == pytest.approx(2 * numbers / sizes.sent, rel=0.01)  # in bf16, beside fp32
    assert float(stated[2]) == pytest.approx(below, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"power_sgd_rank": 2, "optimizer": "onebit_adam"}, "optimizer=onebit_adam does too"),
        ({"power_sgd_rank": 2, "precision": "bf16", "all_reduce_precision": "fp32"}, "all_reduce_precision"),
        ({"power_sgd_rank": 2, "delayed_update": True}, "delayed_update=true does too"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainingConfig(**settings)
