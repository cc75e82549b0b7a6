"""Pipelines on paper: where a model is cut, who computes what when, how long ranks wait, what is refused."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from dhen.errors import UserError
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.cluster.this_machine import load_cluster
from trials.planner.estimates import PlanOptions
from trials.planner.ladder import choose, ladder
from trials.planner.pipeline import (
    StageSeconds,
    layers_per_stage,
    orders,
    played,
    stages_of,
    wrong_micro_batches,
)
from trials.planner.plan import Plan, plan
from trials.records.job import TrainingConfig
from trials.records.strategy import CHUNKS_PER_RANK, Schedule, named

LAYER = {"modules": ["mlp"], "out_embeddings": 8}
MODEL = parse_model({"embedding_dim": 16, "layers": [LAYER] * 6}, "test")
SCHEMA = FeatureSchema(tables=(Table(name="site", rows=1000),), numeric=("age",))
TRAINING = TrainingConfig(batch_size=4096, precision="bf16")


def planned(technique: str | None, ranks: str = "2x4", model: Any = MODEL, **training: Any) -> Plan:
    cluster = load_cluster("zionex").with_ranks(ranks)
    options = PlanOptions(technique=named(technique) if technique else None)
    return plan(model, SCHEMA, TRAINING.replace(**training), cluster, options=options)


@pytest.mark.parametrize("stages", [4, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_compute_for_m_of_m_plus_p_less_1(schedule: Schedule, stages: int) -> None:
    for per_stage in (1, 4, 8):
        m = per_stage * stages
        found = played(schedule, stages, m, (StageSeconds(1.0, 2.0, 0.0, 0.0, 0.0),) * stages)
        efficiency = max(found.busy) / found.seconds
        assert efficiency == pytest.approx(m / (m + stages - 1))
        if stages == 16 and per_stage > 1:  # as DeepSpeed's note has them
            assert round(100 * efficiency) == {4: 81, 8: 90}[per_stage]


def test_other_schedules_wait_less_and_sends_make_all_wait_longer() -> None:
    whole, half = StageSeconds(1.0, 2.0, 1.0, 1.0, 0.0), StageSeconds(0.5, 1.0, 0.0, 0.0, 0.0)
    plain = played("1f1b", 4, 8, (whole,) * 4)
    assert played("interleaved", 4, 8, (half,) * 8).seconds < plain.seconds
    assert played("zero_bubble", 4, 8, (whole,) * 4).seconds < plain.seconds
    slow = played("1f1b", 4, 8, (whole._replace(send=0.5),) * 4)
    assert slow.seconds > plain.seconds
    assert slow.busy == plain.busy == (24.0,) * 4


@pytest.mark.parametrize(
    ("schedule", "of_torch"),
    [
        ("gpipe", ScheduleGPipe),
        ("interleaved", ScheduleInterleaved1F1B),
        ("zero_bubble", ScheduleInterleavedZeroBubble),
    ],
)
def test_orders_are_torchs(schedule: Schedule, of_torch: Any) -> None:
    """But for 1f1b, of which torch only draws an order; what it runs is held beside ours on real ranks."""
    chunks = CHUNKS_PER_RANK[schedule]
    for ranks in (2, 3, 4, 8):
        for m in (2, 3, 4, 6, 8, 16):
            if wrong_micro_batches(schedule, ranks, m) is not None:
                continue
            rounds = max(1, m // ranks)
            like = SimpleNamespace(
                _n_microbatches=m,
                _num_stages=ranks * chunks,
                pp_group_size=ranks,
                n_local_stages=chunks,
                microbatches_per_round=m // rounds,
            )
            if schedule == "gpipe":
                theirs = of_torch._get_pipeline_order(like)
            else:
                theirs = {
                    rank: of_torch._calculate_single_rank_operations(like, rank) for rank in range(ranks)
                }
            assert orders(schedule, ranks, m) == tuple(
                tuple(
                    action[:1] and (action[1].value, action[0], action[2])
                    for action in computed(theirs[rank])
                )
                for rank in range(ranks)
            )


def computed(actions: list[Any]) -> list[Any]:
    return [action for action in actions if action is not None and action.is_compute_op]


@given(st.lists(st.integers(1, 9), min_size=3, max_size=9), st.integers(1, 5))
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(seconds: list[int], stages: int) -> None:
    layers = len(seconds) - 2
    stages = min(stages, layers)

    def slowest(found: tuple[int, ...]) -> int:
        of_layers = [sum(seconds[1:-1][each.start : each.stop]) for each in stages_of(found)]
        of_layers[0] += seconds[0]
        of_layers[-1] += seconds[-1]
        return max(of_layers)

    found = layers_per_stage(tuple(map(float, seconds)), stages)
    assert len(found) == stages
    assert sum(found) == layers
    assert min(found) > 0
    ends = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    every = [tuple(b - a for a, b in pairwise(cut)) for cut in ends]
    assert slowest(found) == min(map(slowest, every))


def test_the_ladder_has_degrees_that_divide_ranks_and_layers_hold() -> None:
    found = [each for each in ladder(2, 6, 64, layers=5) if each.pipeline > 1]
    assert {each.pipeline for each in found} == {2, 3, 4}
    assert {each.micro_batches for each in found if each.pipeline == 4} == {4, 8, 16, 32}
    assert {each.dense for each in found} == {"dp", "zero1"}
    assert {each.dense for each in ladder(1, 4, 64, layers=5) if each.pipeline == 4} == {"dp"}
    assert not any(each.pipeline > 1 for each in ladder(2, 6, 64))
    order = [(len(each.techniques), each.model_parallel) for each in ladder(2, 6, 64, layers=5)]
    assert order == sorted(order)


def test_of_as_many_techniques_a_pipeline_comes_after_those_that_hold_whole_layers() -> None:
    priced = {each.strategy.name: each for each in planned(None).strategies}
    whole, staged = priced["zero1+full_checkpointing"], priced["pipeline2+micro_batches=16"]
    whole = whole.replace(time=whole.time.replace(total=2 * staged.time.total))
    more = priced["zero1+full_checkpointing+micro_batches=2"]
    assert choose([whole, staged, more], "least") == whole
    assert choose([whole, staged, more], "fastest") in (staged, more)
    assert choose([whole.replace(fits=False), staged, more], "least") == staged


def test_a_forced_pipeline_is_planned_and_says_where_it_is_cut() -> None:
    found = planned("zero1+pipeline2=interleaved+micro_batches=8")
    assert found.best.strategy.name == "pipeline2=interleaved+zero1+micro_batches=8"
    assert "Its stages have 1, 2, 2, 1 layers" in found.best.reason
    assert found.best.time.bubble > 0
    baseline = planned("zero1+pipeline2", model=parse_model({"family": "advanced_dlrm"}, "test"))
    assert baseline.chosen.held_as == "zero1"
    assert any("has no layers that could be stages" in note for note in baseline.notes)


@pytest.mark.parametrize(
    ("technique", "ranks", "training", "said"),
    [
        (
            "pipeline4",
            "1x6",
            {},
            "ranks=1x6 are 6, which pipelines of 4 do not divide. Here pipeline2, pipeline3, pipeline6",
        ),
        ("pipeline8", "2x4", {}, "the model has 6 layer(s) for 8 stages. Here pipeline2, pipeline4 would"),
        ("pipeline32", "4x8", {"layers": 32}, "a pipeline has 16 ranks at most"),
        ("pipeline4=interleaved", "2x4", {}, "2 stages for each rank, a stage has a layer at least"),
        ("pipeline4+micro_batches=2", "2x4", {}, "1f1b keeps 4 stages busy with 4 micro-batches or more"),
        ("pipeline2+micro_batches=3", "2x4", {}, "has +micro_batches=2, 4, 8, 16 here"),
        ("pipeline4", "1x4", {"batch_size": 3}, "less than one example for each"),
        (
            "zero1+pipeline4",
            "1x4",
            {},
            "no data rank for zero1 to share with. technique=pipeline4 would work",
        ),
        ("tensor2+pipeline2+zero1", "2x2", {}, "one model take all 4 ranks"),
        (
            "tensor2+pipeline3",
            "2x4",
            {},
            "which pipelines of 3 stages of 2 ranks do not divide. Here tensor2+pipeline2",
        ),
        ("tensor3+pipeline2", "3x4", {}, "are not made of groups of 3"),
        ("tensor2+pipeline2+micro_batches=3", "2x4", {}, "has +micro_batches=2, 4, 8, 16 here"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(
    technique: str, ranks: str, training: dict[str, Any], said: str
) -> None:
    settings = {"layers": 6} | training
    model = MODEL.replace(layers=MODEL.layers[:1] * settings.pop("layers"))
    with pytest.raises(UserError) as error:
        planned(technique, ranks, model, **settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pipeline2+micro_batches=1", "with one micro-batch all ranks but one always wait"),
        ("fsdp+pipeline2", "fsdp does not hold the stages of a pipeline; dp and zero1 do"),
        ("pipeline2=other", "'pipeline2=other' is no memory technique"),
        ("pipeline1", "'pipeline1' is no memory technique"),
    ],
)
def test_names_that_are_no_pipelines_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match="pipeline") as error:
        named(name)
    assert said in str(error.value)
