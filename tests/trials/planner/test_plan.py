"""Plans: the choice follows the rule, sentences say why, and what does not fit says what would."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.blocks.base import BlockConfig
from dhen.blocks.dlrm import DlrmConfig
from dhen.config import DhenConfig, LayerConfig
from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.cluster import Cluster, byte_words
from trials.cluster.this_machine import load_cluster
from trials.planner.collectives import ALLOCATOR_RESERVE_BYTES, LEAST_RESERVE_BYTES
from trials.planner.estimates import PlanOptions
from trials.planner.plan import Plan, plan
from trials.planner.pricing import CostModel
from trials.planner.sentences import PARTS
from trials.records.job import TrainingConfig
from trials.records.strategy import FULLY_SHARDED, Strategy, named

SCHEMA = FeatureSchema(
    tables=(
        Table(name="user", rows=500_000),
        Table(name="item", rows=20_000),
        Table(name="tags", rows=300, multi_hot=True, mean_ids=5),
    ),
    numeric=("price", "age"),
)
TRAINING = TrainingConfig(batch_size=8192, precision="bf16")


class Undeclared(DlrmConfig):
    """A user's own module that declares no memory."""

    write = BlockConfig.write


def model(depth: int = 4, *, module: BlockConfig | None = None, width: int = 512) -> DhenConfig:
    layer = LayerConfig(modules=(module or DlrmConfig(mlp=(width, width)),), out_embeddings=16)
    return DhenConfig(layers=(layer,) * depth, embedding_dim=32)


def small(hbm: int, ranks: str = "2x4", host_memory: str = "1TB") -> Cluster:
    """ZionEX's numbers without a GPU's context and reserve, so that what is declared is for tensors."""
    data = load_cluster("zionex").to_dict() | {
        "device": "cpu",
        "host_memory_bytes": host_memory,
        "sources": {},
    }
    return Cluster.model_validate(data).with_ranks(ranks).with_hbm(hbm)


def made(cluster: Cluster, depth: int = 4, **options: Any) -> Plan:
    return plan(model(depth), SCHEMA, TRAINING, cluster, options=PlanOptions(**options))


NEEDS = sorted({each.memory.total for each in made(small(10**12)).strategies})
"""Of the strategies, bytes per rank; there are some between which the choice changes."""


@settings(max_examples=12)
@given(st.integers(NEEDS[0] - 10**6, NEEDS[-1] + 10**6))
def test_the_least_that_fits_is_chosen_and_the_fastest_among_equals(hbm: int) -> None:
    found = made(small(hbm))
    fitting = [each for each in found.strategies if each.fits]
    for each in found.strategies:
        assert each.fits == (each.memory.total <= hbm)
        assert each.lacking_bytes == max(each.memory.total - hbm, 0)
    if found.best is None:
        assert not fitting
        assert found.remedy
        return

    def order(strategy: Strategy) -> tuple[int, bool]:
        return len(strategy.techniques), strategy.tensor > 1

    least = order(found.best.strategy)
    for each in fitting:
        assert order(each.strategy) >= least
        assert order(each.strategy) > least or each.time.total >= found.best.time.total


@settings(max_examples=6)
@given(st.integers(NEEDS[0], NEEDS[-1]), st.integers(0, 10**8))
def test_more_memory_never_loses_a_strategy(hbm: int, more: int) -> None:
    before, after = made(small(hbm)), made(small(hbm + more))
    fits = {each.strategy for each in after.strategies if each.fits}
    assert {each.strategy for each in before.strategies if each.fits} <= fits
    assert len(after.chosen.techniques) <= len(before.chosen.techniques)


def test_less_and_less_memory_takes_more_and_more_techniques() -> None:
    chosen = {found.chosen.techniques for bytes_ in NEEDS[::-5] if (found := made(small(bytes_))).chosen}
    assert () in chosen
    assert len(chosen) >= 5
    assert max(map(len, chosen)) >= 2


def test_fastest_drops_the_number_of_techniques() -> None:
    for bytes_ in NEEDS[::-40]:
        found = made(small(bytes_), prefer="fastest")
        assert found.best.time.total == min(each.time.total for each in found.strategies if each.fits)
        least = made(small(bytes_))
        assert (least.faster is None) == (least.best.time.total == found.best.time.total)


def test_reductions_wait_for_the_last_micro_batch_where_memory_allows() -> None:
    """Both ways are priced; keeping whole gradients takes memory for a shorter step."""
    found = {priced.strategy: priced for priced in made(small(10**12)).strategies}
    waiting = [strategy for strategy in found if strategy.no_sync]
    assert {strategy.dense for strategy in waiting} == set(FULLY_SHARDED)
    for strategy in waiting:
        last, each = found[strategy], found[strategy.replace(no_sync=False)]
        assert strategy.techniques == each.strategy.techniques
        assert last.memory.total >= each.memory.total
        assert last.time.total < each.time.total
    assert any(found[s].memory.total > found[s.replace(no_sync=False)].memory.total for s in waiting)


def test_the_ladder_can_be_restricted_to_one_way_to_hold_the_model() -> None:
    cluster = small(10**12)
    fsdp = made(cluster, technique=named("fsdp"))
    several = [f"fsdp+micro_batches={count}" for count in (2, 4, 8, 16)]
    names = {"fsdp", *several, *(f"{name}+no_sync" for name in several)}
    assert {priced.strategy.name for priced in fsdp.strategies} == names
    assert fsdp.chosen == named("fsdp")
    assert "The ladder is restricted to technique=fsdp." in fsdp.notes
    two = made(cluster, technique=named("fsdp+micro_batches=2"))
    assert [priced.strategy.name for priced in two.strategies] == ["fsdp+micro_batches=2"]
    free = {priced.strategy.name: priced for priced in made(cluster).strategies}
    assert all(priced == free[priced.strategy.name] for priced in (*fsdp.strategies, *two.strategies))
    with pytest.raises(UserError, match=r"technique=hsdp is not on the ladder.*There are dp, "):
        made(cluster.with_ranks("1x4"), technique=named("hsdp"))


def test_a_margin_is_added_to_predictions_for_the_verdict_alone() -> None:
    need = made(small(10**12)).strategies[0].memory.total
    assert made(small(need)).chosen == Strategy()
    for more in ({"memory_margin": 1}, {"learnt": {"dp": 1}}):
        found = made(small(need), **more)
        dp = found.strategies[0]
        assert (dp.strategy, dp.fits, dp.lacking_bytes, dp.memory.total) == (Strategy(), False, 1, need)
        assert "with the margin" in dp.reason
        assert found.chosen != Strategy()
    assert made(small(need - 1)).chosen != Strategy()
    assert made(small(need - 1), memory_margin=-1).chosen == Strategy()
    assert made(small(need - 1), memory_margin=-1, learnt={"dp": 1}).chosen != Strategy()
    assert made(small(need - 1), memory_margin=-1, learnt={"zero1": 1}).chosen == Strategy()


def test_a_gpu_has_a_context_and_a_reserve_and_a_cpu_has_not() -> None:
    on_gpu = made(load_cluster("zionex").with_ranks("2x4")).strategies[0].memory
    on_cpu = made(small(10**12)).strategies[0].memory
    assert on_gpu.context > 0
    tensors = on_gpu.total - on_gpu.context - on_gpu.reserve
    assert on_gpu.reserve == min(ALLOCATOR_RESERVE_BYTES, max(LEAST_RESERVE_BYTES, tensors))
    assert on_cpu.context == on_cpu.reserve == 0


def test_offload_is_held_by_the_host_and_does_not_fit_a_small_one() -> None:
    free = made(small(10**12)).strategies
    offloaded = {each.strategy.dense for each in free if each.memory.host}
    assert offloaded == {"zero_offload", "shard_grad_op", "hsdp", "fsdp"}
    assert all((each.memory.host > 0) == each.strategy.updated_on_host for each in free)
    poor = [
        each for each in made(small(10**12, host_memory="1MB")).strategies if each.strategy.updated_on_host
    ]
    assert not any(each.fits for each in poor)
    assert all("of a host's memory" in each.reason for each in poor)


def test_reasons_name_the_bytes_and_what_takes_most() -> None:
    found = made(small(NEEDS[len(NEEDS) // 2]))
    dp = found.strategies[0]
    assert dp.strategy == Strategy()
    assert not dp.fits
    assert dp.reason.startswith("dp needs ")
    assert "more than there is" in dp.reason
    largest = max(PARTS, key=lambda part: getattr(dp.memory, part))
    assert f": {byte_words(getattr(dp.memory, largest))} are {PARTS[largest]}" in dp.reason
    assert found.best.reason.startswith(f"{found.chosen.name} needs ")


def test_where_nothing_fits_the_nearest_changes_are_real() -> None:
    found = made(small(NEEDS[0] * 9 // 10))
    assert found.chosen is None
    assert found.closest is not None
    assert "comes closest and lacks" in found.remedy
    layers = re.search(r"with (\d) of 4 layers", found.remedy)
    assert layers is not None, found.remedy
    depth, memory = int(layers[1]), small(NEEDS[0] * 9 // 10)
    assert made(memory, depth).chosen is not None
    assert made(memory, depth + 1).chosen is None


def test_where_no_change_of_batch_hosts_or_layers_helps_a_rank_needs_more_memory() -> None:
    """Weights and their moments alone are more than there is, whatever the batch, and plain DP has them whole."""
    wide = {"embedding_dim": 16, "layers": [{"modules": [{"kind": "mlp", "mlp": [4096, 4096]}]}]}
    no_tables = FeatureSchema(tables=(), numeric=("x", "y"))
    cluster, options = small(100 * 2**20), PlanOptions(technique=named("dp"))
    found = plan(parse_model(wide, "test"), no_tables, TRAINING, cluster, options=options)
    assert found.remedy.endswith(
        "No smaller batch, more hosts or fewer layers alone would fit: give a rank more memory."
    )


def test_a_smaller_batch_is_a_remedy_where_activations_are_what_lacks() -> None:
    large = TRAINING.replace(batch_size=2**20)
    cluster = small(NEEDS[-1])
    found = plan(model(1), SCHEMA, large, cluster)
    assert found.chosen is None
    batch = re.search(r"training\.batch_size=(\d+)", str(found.remedy))
    assert batch is not None, found.remedy
    for size, fits in ((int(batch[1]), True), (2 * int(batch[1]), False)):
        again = plan(model(1), SCHEMA, large.replace(batch_size=size), cluster)
        assert (again.chosen is not None) == fits


def test_tables_that_fit_nowhere_are_no_strategys_fault() -> None:
    found = made(small(2**20))
    assert not found.strategies
    assert found.best is None
    assert found.closest is None
    assert "table" in found.remedy


def test_a_batch_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="at least 8"):
        plan(model(), SCHEMA, TRAINING.replace(batch_size=7), small(10**9))


def test_a_module_that_declares_nothing_is_traced_and_said_so() -> None:
    training = TRAINING.replace(batch_size=512)
    declared = plan(model(2), SCHEMA, training, small(10**12))
    traced = plan(model(2, module=Undeclared(mlp=(512, 512))), SCHEMA, training, small(10**12))
    assert not declared.notes
    assert "'dlrm' declares no memory" in traced.notes[0]
    for one, other in zip(declared.strategies, traced.strategies, strict=True):
        assert one.strategy == other.strategy
        if one.strategy.tensor > 1:  # what is traced is priced as if it were whole
            assert one.memory.parameters < other.memory.parameters
            continue
        assert one.memory.parameters == other.memory.parameters
        assert 0.99 < other.memory.total / one.memory.total < 1.15


def test_delayed_updates_are_planned_with_zero_offload_alone_and_the_plan_says_so() -> None:
    delayed = TRAINING.replace(delayed_update=True)
    cluster = small(10**12)
    found = plan(model(), SCHEMA, delayed, cluster)
    assert {each.strategy.dense for each in found.strategies} == {"zero_offload"}
    assert found.chosen == named("zero_offload")
    assert any("which alone can delay updates" in note for note in found.notes)
    assert not any("delay" in note for note in plan(model(), SCHEMA, TRAINING, cluster).notes)
    full = PlanOptions(technique=named("zero_offload+full_checkpointing"))
    assert plan(model(), SCHEMA, delayed, cluster, options=full).chosen == full.technique
    with pytest.raises(
        UserError, match=r"delayed_update=true is planned with zero_offload alone.*technique=fsdp excludes"
    ):
        plan(model(), SCHEMA, delayed, cluster, options=PlanOptions(technique=named("fsdp")))


def test_no_remedy_leaves_a_rank_fewer_examples_than_micro_batches() -> None:
    """A rank has as many examples as micro-batches, so that neither a smaller batch nor more hosts would do."""
    split = PlanOptions(technique=named("fsdp+micro_batches=4"))
    few = TRAINING.replace(batch_size=4 * small(1).ranks)
    needs = plan(model(1), SCHEMA, few, small(10**9), options=split).strategies[0].memory.total
    found = plan(model(1), SCHEMA, few, small(needs - 1), options=split)
    assert found.chosen is None
    assert "training.batch_size" not in found.remedy
    assert re.search(r"\d+ more host", found.remedy) is None


def test_a_plan_that_splits_modules_says_why_and_what_stays_whole() -> None:
    asked = made(small(10**12), technique=named("tensor2+zero1"))
    assert asked.chosen == named("tensor2+zero1")
    assert not any("Under tensor2" in note for note in asked.notes)
    whole = plan(
        DhenConfig(
            layers=(LayerConfig(modules=("linear", {"kind": "attention", "heads": 1})),),  # type: ignore[arg-type]
            embedding_dim=32,
        ),
        SCHEMA,
        TRAINING,
        small(10**12),
        options=PlanOptions(technique=named("tensor4")),
    )
    (said,) = [note for note in whole.notes if "Under tensor4" in note]
    assert "attention (4 does not divide heads=1; of 4, 8, 16, 32 it would be)" in said
    assert "linear (it declares no split)" in said
    one = model(1, width=16_384), SCHEMA, TRAINING.replace(batch_size=1024)
    cluster = small(10**12, "1x4")
    needs = [
        each.memory.total for each in plan(*one, cluster).strategies if len(each.strategy.techniques) == 1
    ]
    plans = [plan(*one, cluster.with_hbm(bytes_)) for bytes_ in sorted(needs)]
    chosen = [found for found in plans if found.chosen and found.chosen.tensor > 1]
    assert chosen  # one layer is gathered whole, however it is sharded
    for found in chosen:
        assert found.chosen is not None
        (why,) = [note for note in found.notes if note.startswith("Modules are split over")]
        lacks = [each for each in found.strategies if each.strategy.name in why and each.strategy.tensor == 1]
        assert lacks
        assert not any(each.fits for each in lacks)


def test_a_degree_across_hosts_is_priced_in_a_warning() -> None:
    cluster = small(10**12, "2x4")
    inside, across = (made(cluster, technique=named(name)) for name in ("tensor4+zero1", "tensor8"))
    assert across.chosen == named("tensor8")
    assert not any("Warning" in note for note in inside.notes)
    (warning,) = [note for note in across.notes if "Warning" in note]
    network, one_host = map(float, re.findall(r"takes? ([\d.]+) ms.*network, ([\d.]+) ms", warning)[0])
    assert network > one_host > 0
    assert not any(each.strategy.tensor > 4 for each in made(cluster).strategies)


def test_what_no_rank_can_split_is_not_planned_so() -> None:
    alone = DhenConfig(layers=(LayerConfig(modules=("linear",)),), embedding_dim=32, head=())  # type: ignore[arg-type]
    cluster = small(10**12)
    found = plan(alone, SCHEMA, TRAINING, cluster)
    assert not any(each.strategy.tensor > 1 for each in found.strategies)
    asked = plan(alone, SCHEMA, TRAINING, cluster, options=PlanOptions(technique=named("tensor2")))
    assert any("No module of this model can be split" in note for note in asked.notes)


def test_split_weights_are_divided_and_what_is_sent_is_priced() -> None:
    wide = plan(model(4, width=4096), SCHEMA, TRAINING, small(10**12, "1x4"))
    by_name = {each.strategy.name: each for each in wide.strategies}
    dp, two, four = (by_name[name] for name in ("dp", "tensor2", "tensor4"))
    assert dp.memory.optimizer_state == pytest.approx(2 * two.memory.optimizer_state, rel=0.02)
    assert dp.memory.optimizer_state == pytest.approx(4 * four.memory.optimizer_state, rel=0.02)
    assert dp.memory.parameters == pytest.approx(2 * two.memory.parameters, rel=0.02)
    assert two.time.all_gather > 0  # of inputs
    pricing = CostModel(model(4, width=4096), SCHEMA, TRAINING, small(10**12, "1x4"))
    flops = {tensor: sum(each.flops for each in pricing.segments(1, tensor)) for tensor in (1, 2, 4)}
    assert flops[1] == pytest.approx(2 * flops[2], rel=0.02)
    assert flops[1] == pytest.approx(4 * flops[4], rel=0.02)
    sharded = by_name["tensor2+zero1"].memory.optimizer_state
    assert two.memory.optimizer_state == pytest.approx(2 * sharded, rel=0.02)
