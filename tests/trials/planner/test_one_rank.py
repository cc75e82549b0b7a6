"""The predicted peak of a rank that trains alone, beside a real step counted tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dhen.batch import FeatureBatch
from dhen.model import build_model, parse_model
from dhen.schema import FeatureSchema, Table
from dhen.values import parse
from trials.cluster.cluster import Cluster
from trials.data.loader import LabelledBatch
from trials.planner.memory_counter import MemoryCounter
from trials.planner.pricing import pricing_of
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Ranks, Strategy
from trials.training.distributed_step import DistributedStep
from trials.training.memory_limit import counted_by, on_device_for_good, on_host
from trials.training.step import TrainStep

EXAMPLES, IDS_PER_BAG = 512, 3
SCHEMA = FeatureSchema(
    tables=(
        *(Table(name=f"t{index}", rows=2000) for index in range(12)),
        Table(name="tags", rows=500, multi_hot=True, mean_ids=IDS_PER_BAG),
    ),
    numeric=("x", "y"),
)
MODEL: dict[str, Any] = {
    "embedding_dim": 16,
    "layers": [{"modules": ["dcn_v2", "mlp"], "out_embeddings": 8}] * 2,
    "dropout": 0.0,
}
CLUSTER = parse(
    Cluster,
    {
        "hosts": 1,
        "gpus_per_host": 1,
        "device": "cpu",
        "hbm": "4GiB",
        "host_memory_bytes": "8GB",
        "memory_bandwidth": "10GB/s",
        "peak_flops": {"fp32": "100GFLOP/s", "bf16": "100GFLOP/s"},
        "host_link_bandwidth": "10GB/s",
    },
    "test",
)
WITHIN = 2e-4
"""Share of a counted peak that a predicted one may be off by."""


def batch(seed: int, *, counted: bool) -> LabelledBatch:
    """As a batch that is loaded: ids of 32 bits, and 1 / the counts of ids where they are asked for. It reads as
    many rows of each table as it can."""
    drawn = torch.Generator().manual_seed(seed)

    def ids(rows: int, count: int) -> torch.Tensor:
        return (
            torch.randperm(rows, generator=drawn, dtype=torch.int32).repeat(-(-count // rows))[:count].clone()
        )

    bag = ids(500, EXAMPLES * IDS_PER_BAG), torch.arange(EXAMPLES) * IDS_PER_BAG
    features = FeatureBatch(
        ids_BT=torch.stack([ids(2000, EXAMPLES) for _ in range(12)], dim=1),
        bags=((bag[0], bag[1].int()),),
        numeric_BK=torch.randn(EXAMPLES, 2, generator=drawn),
    )
    return LabelledBatch(
        features=features,
        label_B=torch.ones(EXAMPLES),
        weight_B=None,
        inverse_count_BT=torch.rand(EXAMPLES, 13, generator=drawn) if counted else None,
    )


PLAIN, FULL = Strategy(), Strategy(checkpointing="full")
HOST = Strategy(tables="host", table_cache=1100)
SSD = Strategy(tables="ssd", table_cache=700, micro_batches=2)
MIXED: dict[str, Any] = {"table_dim_exponent": 0.4}
SMALL: dict[str, Any] = {"layers": [{"modules": ["linear"], "out_embeddings": 2}]}
"""Beside its tables."""
CLIPPED, DECAYED = {"clip_norm": 0.1}, {"frequency_decay": 0.1}


@pytest.mark.parametrize(
    ("model", "settings", "strategy"),
    [
        *(({}, {}, strategy) for strategy in (PLAIN, FULL, HOST)),
        *((MIXED, CLIPPED, strategy) for strategy in (PLAIN, SSD)),
        *((MIXED, DECAYED, strategy) for strategy in (FULL, HOST)),
        *((SMALL, DECAYED, strategy) for strategy in (PLAIN, SSD)),
    ],
)
def test_one_rank_holds_what_was_predicted(
    model: dict[str, Any], settings: dict[str, Any], strategy: Strategy
) -> None:
    training = TrainingConfig(batch_size=EXAMPLES, precision="fp32", epochs=1, **settings)
    config = parse_model(MODEL | model, "test")
    job = Job(model=config, features=SCHEMA, log="x", training=training, seed=0)
    predicted = pricing_of(job, CLUSTER).memory(strategy).total
    with MemoryCounter() as counter, counted_by(counter):
        with on_host():
            built = build_model(config, SCHEMA).train()
        step: TrainStep | DistributedStep
        if strategy == Strategy() and not training.frequency_decay:
            step = TrainStep(on_device_for_good(built, torch.device("cpu")), training)
        else:
            step = DistributedStep(built, job, strategy, Ranks(), where=torch.device("cpu"))
        del built  # its tables, which the step has
        held = [batch(seed, counted=training.frequency_decay > 0) for seed in range(2)]
        step(held[0])
        counter.start_over("second step")
        step(held[1])
        assert predicted == pytest.approx(counter.peak, rel=WITHIN)


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(checkpointing="full"), Strategy(tables="host", table_cache=1100, micro_batches=2)],
    ids=lambda each: each.name,
)
def test_an_evaluation_holds_no_more_than_a_step_and_has_as_many_rows_as_that_allows(
    strategy: Strategy,
) -> None:
    training = TrainingConfig(batch_size=EXAMPLES, precision="fp32", epochs=1)
    config = parse_model(MODEL, "test")
    job = Job(model=config, features=SCHEMA, log="x", training=training, seed=0)
    pricing = pricing_of(job, CLUSTER)
    rows, predicted = pricing.evaluation_rows(strategy), pricing.memory(strategy).total
    assert rows >= 2 * EXAMPLES / strategy.micro_batches
    with MemoryCounter() as counter, counted_by(counter):
        with on_host():
            built = build_model(config, SCHEMA).train()
        step = DistributedStep(built, job, strategy, Ranks(), where=torch.device("cpu"))
        del built
        held = [batch(seed, counted=False) for seed in range(2)]
        step(held[0])
        peaks = []
        for count in (rows, 3 * rows):
            counter.start_over("evaluation")
            step._score(repeated(held[0].features, count))
            peaks.append(counter.peak)
    assert 0.3 * predicted < peaks[0] <= predicted < peaks[1]


def repeated(features: FeatureBatch, rows: int) -> FeatureBatch:
    """So many rows, of which those of a batch are the first."""
    places = torch.arange(rows) % EXAMPLES
    ((ids, offsets),) = features.bags
    in_bags = ids.view(EXAMPLES, IDS_PER_BAG)[places].flatten()
    return FeatureBatch(
        ids_BT=features.ids_BT[places],
        bags=((in_bags, torch.arange(rows, dtype=offsets.dtype) * IDS_PER_BAG),),
        numeric_BK=features.numeric_BK[places],
    )
