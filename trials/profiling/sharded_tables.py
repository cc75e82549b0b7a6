"""Times tables on ranks that share a training, beside a lookup that sends nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.blocks.linear import LinearConfig
from dhen.config import LayerConfig
from dhen.inputs.table_dims import table_dims
from dhen.model import build_model
from trials.cluster.load import load_cluster
from trials.data.loader import Batch
from trials.distributed.table_split import take_tables
from trials.embeddings.engine import TableEngine, backward
from trials.embeddings.local import LocalTables
from trials.embeddings.sharded import ShardedTables
from trials.job import TrainingConfig
from trials.planner.tables.placement import place
from trials.planner.time.shared_time import table_sizes
from trials.profiling.cases import SEVERAL
from trials.profiling.inputs import Inputs, labelled_batch
from trials.profiling.networks import ROWS
from trials.ranks import Ranks

CASES = (
    (Inputs(26, 13, 2, 39, 16), 128),
    (Inputs(26, 13, 2, 39, 16), 1024),
    (Inputs(26, 13, 0, 39, 32), 512),
    (Inputs(8, 5, 0, 5, 8), 64),
    (Inputs(8, 5, 0, 5, 64), 2048),
    (Inputs(40, 0, 4, 20, 16), 256),
    (Inputs(2, 13, 0, 13, 16), 256),
)
"""Inputs, and examples of a rank."""
PLACED_FOR = "zionex"
"""A cluster for whose links tables are placed: some whole on all ranks, others as shards."""
WARM_UP, STEPS = 2, 5


class TablesTimed(NamedTuple):
    """Seconds of lookup and update, medians."""

    sizes: tuple[float, ...]
    shared: float
    alone: float
    """Seconds of a lookup and its backward in one process, without an update."""


class _Subject(NamedTuple):
    sizes: tuple[float, ...]
    shared: ShardedTables
    alone: LocalTables
    batches: list[Batch]
    gradients: tuple[Tensor, ...]


def placed(ranks: Ranks) -> list[_Subject]:
    """Returns tables over all ranks and in this process; a collective."""
    return [_placed(inputs, examples, ranks) for inputs, examples in CASES]


def _placed(inputs: Inputs, examples: int, ranks: Ranks) -> _Subject:
    schema, model = inputs.schema(), inputs.model((LayerConfig(modules=(LinearConfig(),)),))
    batch_size, cpu = examples * ranks.world, torch.device("cpu")
    config = TrainingConfig(batch_size=batch_size).resolved(ROWS, "fp32")
    cluster = load_cluster(PLACED_FOR).with_ranks(f"{ranks.hosts}x{ranks.gpus_per_host}")
    placement = place(schema.tables, table_dims(model, schema), cluster, global_batch=batch_size)
    torch.manual_seed(0)
    tables = take_tables(build_model(model, schema))
    assert tables is not None
    shared = ShardedTables(tables, schema, config, ranks, placement, cpu)
    batches = [labelled_batch(schema, examples) for _ in range(SEVERAL)]
    gradients = tuple(torch.randn_like(e) for e in tables(batches[0].features))
    return _Subject(table_sizes(placement), shared, LocalTables(tables, config), batches, gradients)


def timed_tables(subjects: list[_Subject]) -> Iterator[TablesTimed]:
    """Yields the seconds of each; a collective."""
    for subject in subjects:
        both = []
        for run in range(WARM_UP + STEPS):
            batch = subject.batches[run % SEVERAL]
            both.append((_shared(subject, batch), _alone(subject, batch)))
        shared, alone = (median(each) for each in zip(*both[WARM_UP:], strict=True))
        yield TablesTimed(subject.sizes, shared, alone)


def _shared(subject: _Subject, batch: Batch) -> float:
    dist.barrier()
    began = time.perf_counter()
    embeddings = _looked_up(subject.shared, batch, subject.gradients)
    subject.shared.update(embeddings)
    return time.perf_counter() - began


def _alone(subject: _Subject, batch: Batch) -> float:
    began = time.perf_counter()
    embeddings = _looked_up(subject.alone, batch, subject.gradients)
    backward(subject.alone._looked_up, embeddings)
    seconds = time.perf_counter() - began
    for weight in subject.alone._weights:
        weight.grad = None
    return seconds


def _looked_up(engine: TableEngine, batch: Batch, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    embeddings = engine.lookup(batch.features)
    for embedding, gradient in zip(embeddings, gradients, strict=True):
        embedding.grad = gradient
    return embeddings
