"""Plans that compress gradients, by one-bit Adam or PowerSGD: what they are offered with, what a step takes, and
the bandwidth below which it pays."""

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
from trials.optim.one_bit_adam import ChunkLayout, low_rank_of
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.planner.pricing import CostModel
from trials.planner.segments import shapes_of
from trials.planner.sentences import worth
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy, named

SCHEMA = FeatureSchema(tables=(Table(name="user", rows=5000),), numeric=("price",))
LAYER = {"modules": [{"kind": "mlp", "mlp": [4096, 4096]}], "out_embeddings": 8}
MODEL = parse_model({"embedding_dim": 32, "layers": [LAYER] * 4}, "test")
ADAMW = TrainingConfig(batch_size=2048, precision="bf16")
ONE_BIT, POWER = ADAMW.replace(optimizer="onebit_adam"), ADAMW.replace(power_sgd_rank=2)
OTHERS = "fsdp", "zero2", "zero_offload", "shard_grad_op+cpu_offload", "hsdp", "tensor2", "pipeline2"


def cluster(gigabits: float, ranks: str = "4x8") -> Cluster:
    found = load_cluster("zionex").with_ranks(ranks)
    return found.replace(network=found.network.replace(bandwidth=gigabits * 1e9 / 8))


def made(training: TrainingConfig, where: Cluster, **options: Any) -> Plan:
    return plan(MODEL, SCHEMA, training, where, options=PlanOptions(**options))


@pytest.mark.parametrize(
    ("training", "kinds", "said"),
    [
        (ONE_BIT, {"dp", "zero1"}, r"onebit_adam is planned with dp and zero1.*Give technique=dp"),
        (POWER, {"dp"}, r"power_sgd_rank=2 is planned with dp alone.*Give technique=dp"),
    ],
    ids=["one-bit Adam", "PowerSGD"],
)
def test_it_is_planned_where_gradients_stay_whole(
    training: TrainingConfig, kinds: set[str], said: str
) -> None:
    several, alone = (made(training, cluster(100, ranks)) for ranks in ("4x8", "1x1"))
    assert {each.strategy.dense for each in several.strategies} == kinds
    assert {each.strategy.dense for each in alone.strategies} == {"dp"}
    assert not any(each.strategy.model_parallel for each in several.strategies)
    assert any("One rank sends nothing" in note for note in alone.notes)
    assert not any("It pays if" in note for note in made(ADAMW, cluster(100)).notes)
    for technique in {*OTHERS, "zero1"} - kinds:
        with pytest.raises(UserError, match=said):
            made(training, cluster(100), technique=named(technique))


@pytest.mark.parametrize("training", [ONE_BIT, POWER], ids=["one-bit Adam", "PowerSGD"])
def test_the_step_is_shorter_below_one_bandwidth_alone_and_the_plan_names_it(
    training: TrainingConfig,
) -> None:
    pricing = CostModel(MODEL, SCHEMA, training, cluster(100))
    found, numbers = worth(pricing, Strategy()), sum(each.parameters for each in pricing.segments(1))
    assert found.pays_below is not None
    below = found.pays_below * 8 / 1e9
    for times, pays in ((0.1, True), (0.9, True), (1.1, False), (10, False)):
        seconds = [
            CostModel(MODEL, SCHEMA, each, cluster(times * below)).time(Strategy()).total
            for each in (training, ADAMW)
        ]
        assert (seconds[0] < seconds[1]) == pays
    said = " ".join(made(training, cluster(100)).notes)
    stated = re.search(r"1/(\S+) of .* It pays if the network has less than (\S+) Gb/s", said)
    assert stated is not None
    sizes = low_rank_of(shapes_of(pricing.segments(1)), 2)
    # PowerSGD's in bf16, beside fp32
    expected = 31 if training is ONE_BIT else 2 * numbers / sizes.sent
    assert float(stated[1]) == pytest.approx(expected, rel=0.01)
    assert float(stated[2]) == pytest.approx(below, rel=0.02)


def test_what_is_sent_is_in_the_all_reduce_and_nothing_hides_it() -> None:
    """The dense part's bytes both ways, at one bit and a scale for 1,024 numbers each."""
    slow = cluster(0.1)
    for dense in ("dp", "zero1"):
        pricing = CostModel(MODEL, SCHEMA, ONE_BIT, slow)
        time = pricing.time(Strategy(dense=dense))
        numbers = sum(segment.parameters for segment in pricing.segments(64))
        layout = ChunkLayout(numbers, slow.ranks)
        through_network = layout.vector_bytes * (slow.ranks - 8) / slow.ranks / (0.9 * 0.1e9 / 8)
        through_network += layout.vector_bytes * (slow.ranks - 1) / slow.ranks / (8 * 0.9 * 0.1e9 / 8)
        assert time.all_reduce == pytest.approx(through_network, rel=0.01)
        assert (time.hidden, time.all_gather, time.reduce_scatter) == (0, 0, 0)


def test_whole_momentum_and_residues_are_in_the_memory() -> None:
    """ZeRO-1 shards moments under AdamW; what one-bit Adam carries and its roots are whole, and of the residue
    there is a chunk."""
    where = cluster(100).replace(device="cpu")
    adamw, one_bit = (CostModel(MODEL, SCHEMA, training, where) for training in (ADAMW, ONE_BIT))
    numbers = sum(segment.parameters for segment in one_bit.segments(64))
    chunk = 4 * ChunkLayout(numbers, where.ranks).chunk
    for dense in ("dp", "zero1"):
        assert one_bit.memory(Strategy(dense=dense)).optimizer_state == 8 * numbers + chunk
    assert adamw.memory(Strategy()).optimizer_state == 8 * numbers
    assert adamw.memory(Strategy(dense="zero1")).optimizer_state == pytest.approx(8 * numbers / 32, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "onebit_adam"}, "optimizer=onebit_adam does too"),
        ({"precision": "bf16", "all_reduce_precision": "fp32"}, "all_reduce_precision"),
        ({"delayed_update": True}, "delayed_update=true does too"),
    ],
)
def test_settings_that_contradict_powersgd_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainingConfig(power_sgd_rank=2, **settings)
