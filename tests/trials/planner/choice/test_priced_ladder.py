"""What is not priced could not have been taken: the choice is that among the whole priced ladder."""

from __future__ import annotations

import random

from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster
from trials.cluster.this_machine import load_cluster
from trials.planner.choice import PricedLadder
from trials.planner.estimates import PlanOptions
from trials.planner.ladder import choose
from trials.planner.plan import Plan, plan
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy

CASES = 120
MODULES = ["mlp", "dlrm", "attention", "dcn_v2", "linear", "conv"]
MIB = 2**20


def drawn(rng: random.Random) -> Plan:
    """A plan of a network, a batch and a cluster drawn at random; of many nothing fits, or little."""
    layers = [
        {
            "modules": rng.choice(
                (rng.sample(MODULES, 2), [{"kind": "mlp", "mlp": [2 ** rng.choice((12, 14))] * 2}])
            ),
            "out_embeddings": rng.choice((4, 16, 64)),
        }
        for _ in range(rng.choice((1, 2)))
    ]
    model = parse_model({"embedding_dim": rng.choice((8, 64, 256)), "layers": layers}, "test")
    tables = tuple(Table(name=f"t{n}", rows=rng.choice((100, 20_000))) for n in range(rng.choice((1, 6))))
    inputs = FeatureSchema(tables=tables, numeric=("age",))
    training = TrainingConfig(batch_size=2 ** rng.choice((8, 16, 18)), precision=rng.choice(("fp32", "bf16")))
    options = PlanOptions(prefer=rng.choice(("least", "fastest")))
    return plan(model, inputs, training, cluster(rng), options=options)


def cluster(rng: random.Random) -> Cluster:
    found = load_cluster(rng.choice(("zionex", "h100")))
    found = found.with_ranks(rng.choice(("1x1", "1x4", "2x2", "2x2", "4x2")))
    slower = found.network.replace(bandwidth=found.network.bandwidth / rng.choice((1, 100)))
    # a GPU's context and its allocator take 2 GiB of it
    return found.with_hbm(round((2**11 + 2 ** rng.uniform(0, 12)) * MIB)).replace(network=slower)


def test_the_choice_is_that_among_all() -> None:
    rng, looked_at, every, kinds = random.Random(0), 0, 0, set()
    for _ in range(CASES):
        found = drawn(rng)
        ladder = found.strategies
        assert isinstance(ladder, PricedLadder)
        looked_at, every = looked_at + ladder.looked_at, every + len(ladder)
        whole = list(found.strategies)
        best = choose(whole, found.options.prefer)
        fastest = choose(whole, "fastest")
        assert found.chosen == (best and best.strategy)
        assert found.best is best
        if best is None:
            closest = min(whole, key=lambda one: one.lacking_bytes)
            assert found.closest is closest
            assert found.lacking_bytes == closest.lacking_bytes
            assert found.faster is None
        else:
            is_faster = fastest.time.total < best.time.total
            assert (found.faster or "").startswith(fastest.strategy.name) == is_faster
        kinds.add((best.strategy.tensor > 1, best.strategy.pipeline > 1) if best else None)
    assert looked_at < 0.65 * every
    assert kinds == {None, (False, False), (True, False), (False, True), (True, True)}


def test_a_cluster_has_each_degree_of_the_one_with_each_of_the_other() -> None:
    layer = {"modules": ["mlp"], "out_embeddings": 8}
    model = parse_model({"embedding_dim": 16, "layers": [layer] * 5}, "test")
    inputs = FeatureSchema(tables=(Table(name="site", rows=100),), numeric=("age",))
    found = plan(
        model,
        inputs,
        TrainingConfig(batch_size=4096, precision="bf16"),
        load_cluster("zionex").with_ranks("3x4"),
    )
    assert isinstance(found.strategies, PricedLadder)
    both = {(s.tensor, s.pipeline, s.dense) for s in found.strategies.strategies if s.ways_to_cut == 2}
    expected = {(t, p, d) for t, p in ((2, 2), (2, 3), (4, 3)) for d in ("dp", "zero1")} - {(4, 3, "zero1")}
    assert both == expected
    assert Strategy(tensor=2, pipeline=2, micro_batches=16) in found.strategies.strategies


def test_32_workers_are_4_tensor_ranks_in_4_stages_in_2_copies_where_nothing_less_fits() -> None:
    """The map of DeepSpeed's 3D parallelism: 8 hosts of 4 GPUs, here of 20 GiB, and four layers of five billion
    parameters, of which no rank can gather one."""
    wide = {"modules": [{"kind": "mlp", "mlp": [65_536, 65_536]}], "out_embeddings": 32}
    model = parse_model({"embedding_dim": 128, "layers": [wide] * 4}, "test")
    tables = tuple(Table(name=f"t{n}", rows=1_000_000) for n in range(26))
    where = load_cluster("zionex").with_ranks("8x4").with_hbm(20 * 2**30)
    training = TrainingConfig(batch_size=8192, precision="bf16")
    found = plan(model, FeatureSchema(tables=tables, numeric=("age",)), training, where)
    assert (found.chosen.tensor, found.chosen.pipeline, found.chosen.dense) == (4, 4, "zero1")
    assert where.ranks // found.chosen.model_ranks == 2
    assert found.chosen.checkpointing == "none"
    (why,) = (note for note in found.notes if note.startswith("Modules are split over 4 ranks"))
    assert "in the stages of a pipeline of 4, because nothing that does only one of the two" in why
    assert not any(one.fits for one in found.strategies if one.strategy.ways_to_cut < 2)
