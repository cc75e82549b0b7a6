"""A small job, and priced strategies, for tests of what is made from them: made up, but consistent."""

from __future__ import annotations

from typing import get_args

from dhen.model import parse_model
from dhen.schema import FeatureSchema, Table
from trials.planner.estimates import MemoryEstimate, PricedStrategy, StepTime
from trials.planner.ladder import ladder
from trials.records.job import Job, TrainingConfig
from trials.records.strategy import Dense, Strategy, shards

GIB = 2**30
HOSTS, GPUS_PER_HOST, EXAMPLES_PER_RANK = 2, 8, 16
BATCH_SIZE = HOSTS * GPUS_PER_HOST * EXAMPLES_PER_RANK
JOB = Job(
    model=parse_model(
        {"embedding_dim": 4, "layers": [{"modules": ["dcn_v2"], "out_embeddings": 2}] * 2}, "test"
    ),
    features=FeatureSchema(tables=(Table(name="c0", rows=100),), numeric=("n0",)),
    log="l",
    training=TrainingConfig(batch_size=64).resolved(1000, "fp32"),
    seed=0,
)


def priced(strategy: Strategy, hbm: int, *, layers: int = 4) -> PricedStrategy:
    """Each layer has a GiB of state and a GiB of activations."""
    state = layers * GIB // shards(strategy.dense, HOSTS, GPUS_PER_HOST)
    kept = {"none": 4, "selective": 3, "full": 1}[strategy.checkpointing]
    activations = layers * GIB * kept // 4 // strategy.micro_batches
    memory = MemoryEstimate(
        parameters=0 if strategy.offload else state,
        gradients=0,
        optimizer_state=0,
        activations=activations,
        activations_by_layer=tuple((f"layer{index}", activations // layers) for index in range(layers)),
        embedding_shards=GIB,
        unsharded_layer=0,
        communication_buffers=0,
        input_batch=0,
        context=0,
        reserve=0,
        host=state if strategy.offload else 0,
        peak_at="forward of layer0",
    )
    forward = 1e-3 * layers
    recomputation = {"none": 0.0, "selective": 0.5, "full": 1.0}[strategy.checkpointing] * forward
    gather = 1e-4 * layers * get_args(Dense).index(strategy.dense)
    transfer = 1e-3 * layers if strategy.offload else 0.0
    repeated = 1e-5 * strategy.micro_batches
    time = StepTime(
        forward=forward + repeated,
        backward=2 * forward,
        recomputation=recomputation,
        lookup=0.0,
        optimizer=0.0,
        all_to_all=0.0,
        all_gather=gather,
        reduce_scatter=0.0,
        all_reduce=0.0,
        host_transfer=transfer,
        hidden=gather / 2,
        total=3 * forward + repeated + recomputation + gather / 2 + transfer,
    )
    lacking = max(0, memory.total - hbm)
    return PricedStrategy(
        strategy=strategy,
        memory=memory,
        time=time,
        fits=lacking == 0,
        lacking_bytes=lacking,
        reason=f"{strategy.name} needs {memory.total / GIB:.1f} GiB, most for activations.",
    )


def priced_ladder(hbm: int, *, layers: int = 4) -> tuple[PricedStrategy, ...]:
    """All strategies of two hosts of eight ranks, fewer techniques first."""
    strategies = ladder(HOSTS, GPUS_PER_HOST, EXAMPLES_PER_RANK)
    return tuple(priced(strategy, hbm, layers=layers) for strategy in strategies)
