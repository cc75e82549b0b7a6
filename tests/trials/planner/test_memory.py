"""Memory composed from tapes: against traces of the real wrapped model, and its algebra."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference.step_trace import trace
from dhen.config import DhenConfig, ModelConfig
from dhen.inputs.lift import table_dims
from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from spaces.space import load_space
from trials.cluster.machine import Precision
from trials.planner.ladder import ladder
from trials.planner.memory import DensePeak, dense_peak, recomputed, unit
from trials.planner.segments import Segment, segments_at, taped
from trials.planner.zero_memory import Activations, DenseRank, Itemsizes, RankInput
from trials.records.job import TrainingConfig
from trials.records.strategy import Dense, Strategy, data_ranks, named

SCHEMA = FeatureSchema(
    tables=(*(Table(name=f"t{i}", rows=100) for i in range(6)), Table(name="bag", rows=9, multi_hot=True)),
    numeric=tuple("abcde"),
)
CASES = 10
TOLERANCE = 0.03
NEGLIGIBLE_BYTES = 64 * 1024


def segments(
    model: ModelConfig, schema: FeatureSchema, precision: Precision, batch: int, tensor: int = 1
) -> tuple[Segment, ...]:
    return segments_at(taped(model, schema, precision, "cpu", tensor), precision, batch)


def candidate(space: str, seed: int) -> ModelConfig:
    found = load_space(space)
    return found.decode(found.random_point(random.Random(seed))).model


def peak(
    model: ModelConfig,
    strategy: Strategy,
    hosts: int,
    gpus: int,
    examples: int,
    precision: Precision,
    training: TrainingConfig | None = None,
    schema: FeatureSchema = SCHEMA,
) -> DensePeak:
    """As the reference counts: the embeddings of a rank's batch lie there from the beginning."""
    micro = -(-examples // strategy.micro_batches)
    width, numbers = 4 * sum(table_dims(model, schema)), len(schema.numeric) + len(schema.bucketed)
    batch = RankInput(width * examples, width * micro, 4 * examples * (numbers + 1))
    found = segments(model, schema, precision, micro, strategy.tensor)
    activations = Activations(found, recomputed(found, strategy))
    hosts, gpus = data_ranks(strategy.tensor, hosts, gpus)
    itemsizes = Itemsizes.of(training or TrainingConfig(precision=precision))
    return dense_peak(DenseRank(found, activations, strategy, batch, itemsizes, hosts, gpus))


Case = tuple[str, int, Strategy, int, int, int, TrainingConfig]


def cases() -> list[Case]:
    """A sample over spaces, strategies, worlds, batches, precisions; benchmarks/planner has hundreds."""
    rng, found = random.Random(4), []
    for index in range(CASES):
        hosts, gpus = rng.choice([(1, 1), (1, 2), (1, 8), (2, 4), (16, 8)])
        strategy = rng.choice([each for each in ladder(hosts, gpus, 512) if each.micro_batches <= 4])
        space = rng.choice(["default", "tiny", "paper_table1", "paper_table3"])
        training = TrainingConfig(
            precision=rng.choice(["fp32", "bf16"]),
            optimizer_precision=rng.choice(["fp32", "bf16"]),
            all_reduce_precision=rng.choice(["auto", "fp32", "bf16"]),
        )
        found.append((space, index, strategy, hosts, gpus, rng.choice([256, 512]), training))
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[0]}-{case[2].name}")
def test_agrees_with_a_trace_of_the_wrapped_model(case: Case) -> None:
    space, seed, *others = case
    agrees(candidate(space, seed), *others)


@pytest.mark.parametrize(
    ("technique", "ranks", "precision"),
    [("tensor2", 2, "bf16"), ("tensor2+micro_batches=2", 4, "fp32"), ("tensor4+zero1", 8, "bf16")],
)
def test_agrees_where_modules_are_split(technique: str, ranks: int, precision: Precision) -> None:
    split = ["mlp", "dlrm", {"kind": "attention", "heads": 4}, "dcn_v2", "dcn", "conv", "linear"]
    model = parse_model(
        {"embedding_dim": 16, "layers": [{"modules": [kind], "out_embeddings": 8} for kind in split]}, "test"
    )
    agrees(model, named(technique), 1, ranks, 512, TrainingConfig(precision=precision))


@pytest.mark.parametrize(("dense", "precision"), [("zero1", "fp32"), ("fsdp", "bf16")])
def test_agrees_where_embeddings_are_lifted_and_buckets_interpolated(
    dense: Dense, precision: Precision
) -> None:
    buckets = [Table(name=f"{name}__bucket", rows=34, buckets=True) for name in SCHEMA.numeric]
    schema = SCHEMA.replace(tables=(*SCHEMA.categorical, *buckets, *SCHEMA.multi_hot))
    model = candidate("tiny", 0).replace(embedding_dim=32, table_dim_exponent=0.3, buckets="interpolated")
    assert set(table_dims(model, schema)) == {16, 32}
    training = TrainingConfig(precision=precision)
    agrees(model, Strategy(dense=dense, micro_batches=2), 1, 2, 512, training, schema)


def agrees(
    model: ModelConfig,
    strategy: Strategy,
    hosts: int,
    gpus: int,
    examples: int,
    training: TrainingConfig,
    schema: FeatureSchema = SCHEMA,
) -> None:
    assert training.precision != "auto"
    real = trace(
        model,
        schema,
        strategy,
        hosts=hosts,
        gpus_per_host=gpus,
        examples_per_rank=examples,
        training=training,
    )
    found = peak(model, strategy, hosts, gpus, examples, training.precision, training, schema)
    assert abs(found.total - real.total) <= TOLERANCE * real.total + NEGLIGIBLE_BYTES, (
        found.total / real.total,
        found.moment.at,
        real.peak_at,
    )
    assert abs(found.host - real.host) <= TOLERANCE * real.host + NEGLIGIBLE_BYTES


@pytest.mark.parametrize(
    ("strategy", "members_from"),
    [
        (Strategy(dense="fsdp"), 0),
        (Strategy(dense="zero1", checkpointing="full", micro_batches=2), 1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_agrees_where_members_share_layers(strategy: Strategy, members_from: int) -> None:
    layer = {"modules": ["dlrm", "linear"], "raw_numeric": True}
    model = parse_model(
        {"layers": [layer] * 2, "dropout": 0.1, "members": 4, "members_from": members_from}, "test"
    )
    agrees(model, strategy, 1, 2, 512, TrainingConfig(precision="bf16"))


models = st.builds(candidate, st.sampled_from(["default", "wide", "tiny"]), st.integers(0, 10_000))
strategies = st.sampled_from(ladder(2, 8, 64))
precisions = st.sampled_from(["fp32", "bf16"])


@settings(max_examples=20)
@given(models, strategies, precisions, st.integers(1, 200))
def test_parts_add_up_and_a_larger_batch_never_needs_less(
    model: ModelConfig, strategy: Strategy, precision: Precision, batch: int
) -> None:
    found = peak(model, strategy, 2, 8, batch, precision)
    assert sum(size for _, size in found.by_segment) == found.moment.activations
    assert min(size for _, size in found.by_segment) >= 0
    assert 0 < found.total <= peak(model, strategy, 2, 8, batch + 16, precision).total


@settings(max_examples=20)
@given(models, strategies, precisions)
def test_more_ranks_never_raise_what_is_sharded(
    model: ModelConfig, strategy: Strategy, precision: Precision
) -> None:
    before = peak(model, strategy, 2, 4, 64, precision)
    for hosts, gpus in ((2, 8), (4, 8)):
        after = peak(model, strategy, hosts, gpus, 64, precision)
        assert after.optimizer_state <= before.optimizer_state
        padding = 0
        if strategy.dense in (
            "zero1",
            "zero2",
            "zero_offload",
        ):  # weights stay whole, in buckets of equal parts
            padding = 4 * hosts * gpus * (len(model.layers) + 2 if isinstance(model, DhenConfig) else 3)
        assert after.parameters <= before.parameters + padding
        assert after.host <= before.host
        before = after


@settings(max_examples=20)
@given(models, precisions, st.integers(1, 300))
def test_checkpointing_never_raises_what_is_saved(
    model: ModelConfig, precision: Precision, batch: int
) -> None:
    found = segments(model, SCHEMA, precision, batch)
    strategies = (Strategy(checkpointing=how) for how in ("none", "selective", "full"))
    kept = [sum(Activations(found, recomputed(found, strategy)).kept) for strategy in strategies]
    assert kept == sorted(kept, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=5), st.integers(1, 64))
def test_a_unit_is_padded_to_equal_shards(shapes: list[tuple[int, int]], ranks: int) -> None:
    found = unit(tuple(shapes), ranks)
    assert found.padded == found.shard * ranks
    assert found.whole <= found.padded < found.whole + ranks * sum(width for _, width in shapes) + 1


def test_selective_checkpointing_begins_with_the_first_layer() -> None:
    found = segments(candidate("paper_table3", 3), SCHEMA, "fp32", 4)
    names = [segment.name for segment in found]
    again = recomputed(found, Strategy(checkpointing="selective"))
    assert [name for name, yes in zip(names, again, strict=True) if yes] == names[1:-1:2]
    assert not any(recomputed(found, Strategy()))
