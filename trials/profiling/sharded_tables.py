"""Times tables on ranks that share a training, beside a lookup that sends nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhen.blocks.linear import LinearConfig
from dhen.config import LayerConfig
from dhen.inputs.held_schema import held_schema
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
from trials.profiling.timing import OTHER_VALUES
from trials.ranks import Ranks

TablesCase = tuple[Inputs, int]
"""Inputs, and examples of a rank."""
CASES: tuple[TablesCase, ...] = (
    (Inputs(26, 13, 2, 39, 16), 128),
    (Inputs(26, 13, 2, 39, 16), 2048),
    (Inputs(26, 13, 0, 39, 32), 1024),
    (Inputs(8, 5, 0, 5, 8), 64),
    (Inputs(8, 5, 0, 5, 64), 512),
    (Inputs(40, 0, 4, 20, 16), 256),
    (Inputs(2, 13, 0, 13, 16), 256),
)
"""The first ones are those of networks too (`trials.profiling.engines`)."""
PLACED_FOR = "zionex"
"""A cluster for whose links tables are placed: some whole on all ranks, others as shards."""
WARM_UP, STEPS = 2, 5


class TablesTimed(NamedTuple):
    """Seconds of lookup and update, medians."""

    sizes: tuple[float, ...]
    shared: float
    local: float
    """Seconds of a lookup and its backward in one process, without an update."""


class PlacedTables(NamedTuple):
    """Tables over all ranks, and in this process."""

    sizes: tuple[float, ...]
    shared: ShardedTables
    local: LocalTables
    batches: list[Batch]
    gradients: tuple[Tensor, ...]
    other: Tensor
    """What is read between two runs."""


def placed(ranks: Ranks) -> dict[TablesCase, PlacedTables]:
    """Returns tables over all ranks and in this process; a collective."""
    return {case: _placed(*case, ranks) for case in CASES}


def _placed(inputs: Inputs, examples: int, ranks: Ranks) -> PlacedTables:
    schema, model = inputs.schema(), inputs.model((LayerConfig(modules=(LinearConfig(),)),))
    batch_size, cpu = examples * ranks.world, torch.device("cpu")
    config = TrainingConfig(batch_size=batch_size).resolved(ROWS, "fp32")
    cluster = load_cluster(PLACED_FOR).with_ranks(f"{ranks.hosts}x{ranks.gpus_per_host}")
    held = held_schema(model, schema)
    placement = place(held.tables, table_dims(model, schema), cluster, global_batch=batch_size)
    torch.manual_seed(0)
    tables = take_tables(build_model(model, schema))
    assert tables is not None
    shared = ShardedTables(tables, held, config, ranks, placement, cpu)
    batches = [labelled_batch(schema, examples) for _ in range(SEVERAL)]
    gradients = tuple(torch.randn_like(e) for e in tables(batches[0].features))
    local, other = LocalTables(tables, config), torch.zeros(OTHER_VALUES)
    return PlacedTables(table_sizes(placement), shared, local, batches, gradients, other)


def timed_tables(subjects: Iterable[PlacedTables]) -> Iterator[TablesTimed]:
    """Yields the seconds of each; a collective."""
    for subject in subjects:
        both = [(alone(subject, run), _local(subject, run)) for run in range(WARM_UP + STEPS)]
        shared, local = (median(each) for each in zip(*both[WARM_UP:], strict=True))
        yield TablesTimed(subject.sizes, shared, local)


def alone(subject: PlacedTables, run: int = 0) -> float:
    """Returns the seconds of lookup and update, begun by all ranks at the same time, with caches as cold as in a
    step."""
    subject.other.add_(1.0)
    dist.barrier()
    began = time.perf_counter()
    embeddings = _looked_up(subject.shared, subject.batches[run % SEVERAL], subject.gradients)
    subject.shared.update(embeddings)
    return time.perf_counter() - began


def _local(subject: PlacedTables, run: int) -> float:
    began = time.perf_counter()
    embeddings = _looked_up(subject.local, subject.batches[run % SEVERAL], subject.gradients)
    backward(subject.local._looked_up, embeddings)
    seconds = time.perf_counter() - began
    for weight in subject.local._weights:
        weight.grad = None
    return seconds


def _looked_up(engine: TableEngine, batch: Batch, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    embeddings = engine.lookup(batch.features)
    for embedding, gradient in zip(embeddings, gradients, strict=True):
        embedding.grad = gradient
    return embeddings
