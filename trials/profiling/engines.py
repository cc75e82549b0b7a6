"""Times engines of the dense part on ranks that share a training, beside the same compute without an engine.

A micro-batch whose gradients wait, one whose gradients are reduced, and the update are timed apart; so are whole
steps with tables, where one part's wait for other ranks is in another part's time. All networks are kept from
round to round: wrapping a model takes longer than its steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from dhen.blocks.dcn import DcnConfig
from dhen.blocks.dlrm import DlrmConfig
from dhen.blocks.linear import LinearConfig
from dhen.blocks.mlp import MlpConfig
from dhen.config import DhenConfig, LayerConfig
from dhen.model import build_model
from dhen.schema import FeatureSchema
from trials.cluster.machine import Precision
from trials.distributed.parallelize import ParallelStep, device_mesh, parallelize
from trials.distributed.table_split import DenseBatch, DenseInputs, take_tables
from trials.job import TrainingConfig
from trials.planner.ladder import ways_to_hold
from trials.planner.segments import segments
from trials.planner.time.shared_time import engine_sizes
from trials.profiling.cases import SEVERAL
from trials.profiling.inputs import Inputs, labelled_batch
from trials.profiling.networks import ROWS
from trials.profiling.sharded_tables import PlacedTables, TablesCase, alone
from trials.ranks import Ranks
from trials.strategy import FULLY_SHARDED, Dense, Strategy

SMALL, LARGE = Inputs(8, 5, 0, 5, 8), Inputs(26, 13, 2, 39, 16)
NETWORKS = (
    (SMALL, (LayerConfig(modules=(LinearConfig(),)),), 64),
    (LARGE, (LayerConfig(modules=(MlpConfig(), DcnConfig(), LinearConfig())),) * 4, 128),
    (LARGE, (LayerConfig(modules=(DlrmConfig(), LinearConfig())),) * 2, 2048),
    (LARGE, (LayerConfig(modules=(MlpConfig(mlp=(4096,)),)),), 128),
    (LARGE, (LayerConfig(modules=(MlpConfig(mlp=(512, 512)), MlpConfig())),) * 3, 128),
)
"""Networks of few and many layers, tensors and numbers, and examples of a rank; they are always the same."""
WARM_UP, STEPS = 1, 3
ALONE: Literal[""] = ""
"""Name of the engine of compute alone."""


class EngineTimed(NamedTuple):
    """Seconds of a network under an engine, medians."""

    engine: str
    """A way to hold the dense part, or `ALONE`."""
    sizes: tuple[float, ...]
    operations: int
    waiting: float
    """Seconds of forward and backward of a micro-batch whose gradients wait."""
    reduced: float
    """Seconds of forward and backward of a micro-batch whose gradients are reduced."""
    update: float
    whole: float
    """Seconds of a step after another, with lookup and update of tables; 0 of compute alone."""
    tables: float
    """Seconds of these tables' lookup and update by themselves, noted with compute alone."""


class _Subject(NamedTuple):
    """A network under an engine."""

    engine: str
    sizes: tuple[float, ...]
    operations: int
    step: ParallelStep
    batch: DenseBatch
    tables: PlacedTables | None


def wrapped(precision: Precision, ranks: Ranks, tables: Mapping[TablesCase, PlacedTables]) -> list[_Subject]:
    """Returns each network without an engine and under each, with those tables that there are; a collective."""
    found = []
    for inputs, layers, examples in NETWORKS:
        model, schema = inputs.model(layers), inputs.schema()
        its = segments(model, schema, precision, "cpu", examples)
        operations, its_tables = sum(segment.operations for segment in its), tables.get((inputs, examples))
        for engine in (ALONE, *ways_to_hold(ranks.hosts, ranks.gpus_per_host)):
            step, batch = _wrapped(model, schema, engine, precision, ranks, examples)
            found.append(_Subject(engine, engine_sizes(its), operations, step, batch, its_tables))
    return found


def _wrapped(
    model: DhenConfig,
    schema: FeatureSchema,
    engine: Dense | Literal[""],
    precision: Precision,
    ranks: Ranks,
    examples: int,
) -> tuple[ParallelStep, DenseBatch]:
    training = TrainingConfig(batch_size=examples * ranks.world).resolved(ROWS, precision)
    torch.manual_seed(0)
    network = build_model(model, schema).train()
    tables, batch = take_tables(network), labelled_batch(schema, examples)
    assert tables is not None
    embeddings = tuple(e.detach().requires_grad_() for e in tables(batch.features))
    if engine == ALONE:
        strategy, mesh = Strategy(), None
    else:
        strategy = Strategy(dense=engine, micro_batches=2, no_sync=engine in FULLY_SHARDED)
        mesh = device_mesh(strategy.dense, ranks.hosts, ranks.gpus_per_host, "cpu")
    step = parallelize(network, strategy, training, mesh, where=torch.device("cpu"))
    inputs = DenseInputs.of(embeddings, batch.features)
    return ParallelStep(step.engine, 1), DenseBatch(inputs, batch.label_B)


def timed_engines(subjects: list[_Subject]) -> Iterator[EngineTimed]:
    """Yields the seconds of each; a collective."""
    for subject in subjects:
        runs = [_once(subject) for _ in range(WARM_UP + STEPS)][WARM_UP:]
        waiting, reduced, update = (median(each) for each in zip(*runs, strict=True))
        whole, tables = 0.0, 0.0
        if subject.engine != ALONE:
            whole = median([_whole(subject, run) for run in range(WARM_UP + STEPS)][WARM_UP:])
        elif subject.tables:
            tables = median([alone(subject.tables, run) for run in range(WARM_UP + STEPS)][WARM_UP:])
        times = (waiting, reduced, update, whole, tables)
        yield EngineTimed(subject.engine, subject.sizes, subject.operations, *times)


def _whole(subject: _Subject, run: int) -> float:
    """Returns the seconds of a step as `trials.training.distributed_step` makes it, with no wait but those that it
    has."""
    began = time.perf_counter()
    batch, tables = subject.batch, subject.tables
    if tables is not None:
        embeddings = tables.shared.lookup(tables.batches[run % SEVERAL].features)
        batch = batch._replace(inputs=batch.inputs._replace(embeddings=embeddings))
    subject.step.forward_backward(batch)
    if tables is not None:
        tables.shared.update(batch.inputs.embeddings)
    subject.step.update()
    return time.perf_counter() - began


def _once(subject: _Subject) -> tuple[float, float, float]:
    engine = subject.step.engine
    waiting = _pass(subject, waits=True)
    reduced = _pass(subject, waits=False)
    began = time.perf_counter()
    engine.update()
    return waiting, reduced, time.perf_counter() - began


def _pass(subject: _Subject, *, waits: bool) -> float:
    """Returns the seconds of a micro-batch, begun by all ranks at the same time."""
    for embedding in subject.batch.inputs.embeddings:
        embedding.grad = None
    dist.barrier()
    began = time.perf_counter()
    subject.step.engine.accumulate_only(waits)
    subject.step._micro_batch(subject.batch, 1.0)
    return time.perf_counter() - began
