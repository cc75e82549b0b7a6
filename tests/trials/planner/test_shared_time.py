"""Steps of ranks that share a training on a CPU where that was measured."""

from __future__ import annotations

import pytest

from dhen.memory.parts import Part
from dhen.memory.replay import Footprint
from dhen.memory.tape import Held, Sent
from trials.cluster.cluster import Cluster
from trials.cluster.load import load_cluster
from trials.cluster.part_costs import ANY, BETWEEN, LOSS, UPDATE, KindCost, PartCosts
from trials.cluster.shared_costs import EngineCost, SharedCosts
from trials.job import TrainingConfig
from trials.planner.estimates import StepTime
from trials.planner.segments import Segment
from trials.planner.tables.placement import Placement, TableShard
from trials.planner.time.step_time import step_time
from trials.strategy import Dense, Strategy

FORWARD, BACKWARD = 1e-5, 3e-5
"""Seconds for each example."""
EXAMPLES, LAYERS, TENSORS, NUMBERS = 256, 3, 2, 500
UNITS = LAYERS + 1
TRAINING = TrainingConfig(batch_size=2 * EXAMPLES, precision="fp32").resolved(100_000, "fp32")
NO_TABLES = Placement((), (), (0, 0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), 0)
PASSES, REDUCED, UPDATED = 1e-3, 2e-3, 4e-3
ENGINE = EngineCost(passes=(0, PASSES, 0, 0), reduced=(0, REDUCED, 0, 0), update=(0, UPDATED, 0, 0))
COMPUTE = EXAMPLES * (FORWARD + BACKWARD) * LAYERS


def parts(shared: SharedCosts | None) -> PartCosts:
    nothing = KindCost(forward=(0.0,) * 8, backward=(0.0,) * 8)
    per_row = tuple(float(place == 3) for place in range(8))
    block = KindCost(
        forward=tuple(FORWARD * each for each in per_row), backward=tuple(BACKWARD * each for each in per_row)
    )
    two, three = (KindCost(forward=(0.0,) * n, backward=(0.0,) * n) for n in (2, 3))
    kinds = {ANY: nothing, BETWEEN: two, LOSS: two, UPDATE: three, "block mlp": block}
    return PartCosts(precision="fp32", threads=1, processes=2, kinds=kinds, shared=shared)


def shared(**changes: object) -> SharedCosts:
    ways: tuple[Dense, ...] = ("dp", "zero1", "zero2", "fsdp", "hsdp")
    return SharedCosts(ranks="1x2", engines=dict.fromkeys(ways, ENGINE), tables=(0.0,) * 7).replace(**changes)


def network() -> list[Segment]:
    block = Part("block mlp", 5, Held(), (0.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    empty = Footprint(*[0] * len(Footprint._fields))
    return [
        Segment(f"layer{place}", NUMBERS * TENSORS, 0.0, empty, ((NUMBERS, 1),) * TENSORS, 0, (), 5, (block,))
        for place in range(LAYERS)
    ]


def on(ranks: str, costs: PartCosts) -> Cluster:
    data = load_cluster("h100").to_dict() | {"device": "cpu", "verified": True, "sources": {}}
    return Cluster.model_validate(data).with_ranks(ranks).replace(part_costs=costs)


def step(strategy: Strategy, known: SharedCosts | None = None, placement: Placement = NO_TABLES) -> StepTime:
    costs = parts(known or shared())
    return step_time(
        network(), strategy, on("1x2", costs), placement, examples_per_rank=EXAMPLES, training=TRAINING
    )


@pytest.mark.parametrize("dense", ["dp", "zero1", "zero2", "fsdp"])
def test_a_shared_step_is_compute_and_what_its_engine_was_measured_to_take(dense: Dense) -> None:
    found = step(Strategy(dense=dense))
    assert found.forward + found.backward == pytest.approx(COMPUTE)
    assert found.total == pytest.approx(COMPUTE + UNITS * (PASSES + REDUCED + UPDATED))
    assert found.hidden == 0.0


def test_items_of_a_shared_step_add_up() -> None:
    found = step(Strategy(dense="zero2"), shared(waits=(1e-3, 0.1, 1e-9)))
    assert sum(value for name, value in found.to_dict().items() if name != "total") == pytest.approx(
        found.total
    )


def test_ranks_wait_longer_where_there_is_more_compute_and_where_there_are_more_numbers() -> None:
    more = step(Strategy(), shared(waits=(1e-3, 0.5, 1e-6))).total - step(Strategy()).total
    assert more == pytest.approx(1e-3 + 0.5 * COMPUTE + 1e-6 * LAYERS * TENSORS * NUMBERS)


def test_micro_batches_reduce_as_often_as_the_engine_does() -> None:
    once, four = (step(Strategy(dense="dp", micro_batches=n)).total for n in (1, 4))
    assert four - once == pytest.approx(3 * UNITS * PASSES)
    once, four = (step(Strategy(dense="fsdp", micro_batches=n)).total for n in (1, 4))
    assert four - once == pytest.approx(3 * UNITS * (PASSES + REDUCED))
    waiting = step(Strategy(dense="fsdp", micro_batches=4, no_sync=True)).total
    assert waiting - once == pytest.approx(3 * UNITS * PASSES)


def test_sharded_and_replicated_tables_take_what_was_measured() -> None:
    placement = NO_TABLES._replace(
        replicated=("a",),
        shards=(TableShard("b", 0, 0, 8), TableShard("b", 1, 8, 8)),
        all_to_all_bytes_per_rank=(10.0, 20.0),
        id_bytes_per_rank=(3.0, 5.0),
        replicated_gradient_bytes=7,
    )
    known = shared(tables=(1e-3, 2e-3, 3e-5, 4e-5, 5e-3, 6e-3, 7e-5))
    found = step(Strategy(), known, placement)
    assert found.all_to_all == pytest.approx(1e-3 + 2e-3 + 20 * 3e-5 + 5 * 4e-5)
    assert found.lookup == pytest.approx(5e-3 + 6e-3 + 7 * 7e-5)


def test_counting_of_memory_is_in_every_micro_batch() -> None:
    counted = shared(counted=True, counting=(1e-3, 1e-4))
    for micro_batches in (1, 4):
        strategy = Strategy(micro_batches=micro_batches)
        more = step(strategy, counted).total - step(strategy).total
        assert more == pytest.approx(micro_batches * (1e-3 + 1e-4 * 5 * LAYERS))


def test_what_was_measured_for_other_ranks_is_not_used() -> None:
    for known in (shared(ranks="2x2"), shared(engines={})):
        strategy, costs = Strategy(dense="fsdp"), parts(known)
        found = step_time(
            network(), strategy, on("1x2", costs), NO_TABLES, examples_per_rank=EXAMPLES, training=TRAINING
        )
        without = on("1x2", parts(None))
        assert found == step_time(
            network(), strategy, without, NO_TABLES, examples_per_rank=EXAMPLES, training=TRAINING
        )


def test_ranks_that_take_turns_with_other_trainings_take_so_many_times_as_long() -> None:
    known = shared(waits=(1e-3, 0.5, 1e-6), tables=(1e-3,) * 7, counting=(1e-3, 1e-4))
    twice = parts(known.in_turns(2.0)).in_turns(2.0)
    slow = step_time(
        network(), Strategy(), on("1x2", twice), NO_TABLES, examples_per_rank=EXAMPLES, training=TRAINING
    )
    assert slow.total == pytest.approx(2 * step(Strategy(), known).total)


def test_what_tensor_groups_send_is_what_was_measured() -> None:
    """A group that has all ranks has no gradients to reduce; what it sends hides behind nothing."""
    sent = {"all_reduce": (1e-3, 1e-9), "all_gather": (2e-3, 0.0)}
    forward, backward = Sent("all_reduce", Held(4), True), Sent("all_reduce", Held(8), False)
    tape = (forward, backward, Sent("all_gather", Held(4), True))
    found = step_time(
        [segment._replace(sent=tape) for segment in network()],
        Strategy(tensor=2),
        on("1x2", parts(shared(collectives=sent))),
        NO_TABLES,
        examples_per_rank=EXAMPLES,
        training=TRAINING,
    )
    assert found.all_reduce == pytest.approx(LAYERS * (2 * 1e-3 + 12e-9 * EXAMPLES))
    assert found.all_gather == pytest.approx(LAYERS * 2e-3 + 2e-3)  # and the group's inputs
    assert found.hidden == 0
    assert found.total == pytest.approx(COMPUTE + found.optimizer + found.all_reduce + found.all_gather)
