"""What each rank does in `technique_equality.py`: some steps under a counted memory, and how that went."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dhen.model import build_model
from dhen.values import Value
from trials.cluster.machine import device
from trials.data.loader import train_batches
from trials.data.prepared_log import PreparedLog
from trials.records.events import TrainingEvent
from trials.records.strategy import KIB, Ranks, Strategy
from trials.records.task import Task
from trials.records.trial_record import Measurements
from trials.runtime.worker import Emit, run_rank
from trials.training.distributed_step import DistributedStep
from trials.training.memory_limit import limited_memory, on_device_for_good, on_host
from trials.training.step import Step, TrainStep

STEPS = 50
ANSWER = "answer.json"


class Answer(Value):
    """Of all ranks together."""

    losses: tuple[float, ...]
    """Of each global batch."""
    held_bytes: int
    """Weights and optimizer state, tables included, of the rank that has most; on a device, not on its host."""
    peak_bytes: int
    """Of the rank that had most at any moment."""


def ours(data: dict[str, object], folder: str, rank: int) -> None:
    """A rank that our launcher has started."""
    run_rank(data, folder, rank, _body)


def _body(task: Task, ranks: Ranks, folder: Path, emit: Emit) -> None:
    log = PreparedLog.open(Path(task.log_directory))
    with limited_memory(task.hbm, device()) as peak_bytes:
        torch.manual_seed(task.job.seed)
        with on_host():
            model = build_model(task.job.model, task.job.features).train()
        step = _step(model, task, ranks)
        del model  # its tables, which the step has
        losses = _losses(step, log, task, ranks)
        held_bytes = _held_bytes(step, task.strategy)
        most = _most(ranks, held_bytes, peak_bytes())
    best = step.evaluate(log, "validation")
    if ranks.first:
        answer = Answer(losses=tuple(losses), held_bytes=most[0], peak_bytes=most[1])
        (folder / ANSWER).write_text(answer.model_dump_json())
    emit(
        TrainingEvent(
            best=best,
            measured=Measurements(
                examples_per_second=0.0,
                step_ms=0.0,
                peak_memory_bytes=most[1],
                train_seconds=0.0,
                evaluate_seconds=0.0,
            ),
        )
    )


def _step(model: nn.Module, task: Task, ranks: Ranks) -> TrainStep | DistributedStep:
    if ranks.world == 1 and task.strategy == Strategy():
        return TrainStep(on_device_for_good(model, device()), task.job.training)
    return DistributedStep(model, task.job, task.strategy, ranks, task.cluster, where=device())


def _losses(step: Step, log: PreparedLog, task: Task, ranks: Ranks) -> list[float]:
    size = task.job.training.batch_size
    assert size is not None
    batches = train_batches(
        log.split("train"), batch_size=size, seed=0, epoch=0, rank=ranks.rank, ranks=ranks.world
    )
    losses = []
    ahead = itertools.chain(itertools.islice(batches, STEPS), (None,))
    for batch, _ in itertools.pairwise(ahead):  # a training has the next one too
        assert batch is not None
        loss = step(batch)
        if ranks.world > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks.world)
    return losses


def _held_bytes(step: TrainStep | DistributedStep, strategy: Strategy) -> int:
    """Of this rank, without what lies below the device; under zero_offload that has all weights, in fp32 here."""
    state = step.dense_state()
    dense = sum(piece.values.nbytes for held in state.values() for piece in held.pieces)
    if strategy.updated_on_host:
        dense = 4 * state["weight"].length if strategy.dense == "zero_offload" else 0
    if strategy.tables != "device":
        return dense + KIB * step.strategy.table_cache
    return dense + sum(each.nbytes for each in step.table_state().values())


def _most(ranks: Ranks, *numbers: int) -> list[int]:
    most = torch.tensor(numbers)
    if ranks.world > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()
