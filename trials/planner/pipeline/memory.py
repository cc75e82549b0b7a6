"""Memory of a pipeline's ranks: the fullest one's, at its peak.

A rank holds its stages' weights, gradients and optimizer state as dp or zero1 do, gradients from the first
micro-batch on. Of each micro-batch that has gone forward through a stage and not yet back it holds what the stage
keeps for backward, and what it has sent on; how many these are follows from the passes in their order. What stages
receive has a place for every micro-batch, for activations as for gradients, which `torch.distributed.pipelining`
makes before the first step. The first stage has the embeddings of all of the pipeline's examples, and their
gradients, beside those that its rank looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dhen.memory.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.planner.live_memory import Activations, Batch, Itemsizes, LiveMemory, total
from trials.planner.memory import DensePeak, recomputed, update_workspace
from trials.planner.pipeline.cut import stages_of
from trials.planner.pipeline.orders import most_held
from trials.planner.segments import Segment
from trials.planner.zero.memory import TABLES_UPDATE, zero_state, zero_wrapping_bytes
from trials.strategy import Strategy


class StageMemory(NamedTuple):
    """One stage of a model, in bytes of one micro-batch."""

    segments: tuple[Segment, ...]
    received: int
    """Activations from the stage before it; 0 for the first."""
    sent: int
    """Activations to the next stage; 0 for the last."""
    kept: int
    """What is held of a micro-batch from its forward pass to its backward pass."""
    forward: int
    """The most that a forward pass holds."""
    backward: int
    """The most that a backward pass holds."""
    parameters: int
    """Number of parameters (values, not bytes)."""


def pipeline_peak(
    stages: Sequence[StageMemory],
    strategy: Strategy,
    batch: Batch,
    looked_up: int,
    gathered: int = 0,
    *,
    itemsizes: Itemsizes,
    data_ranks: int,
    device: Literal["cpu", "cuda"],
    bucket_bytes: int,
) -> DensePeak:
    """Returns the dense part of the fullest rank, at the peak of a step after the first.

    Args:
        stages: all stages of the model, at the micro-batch's size.
        strategy: how it is held.
        batch: what a rank reads; its embeddings are those of all of the pipeline's examples.
        looked_up: bytes of the embeddings that each rank looks up.
        gathered: bytes of those that each rank of the first stage has of its pipeline, beside those of its tensor
            group; 0 where the first are the second.
        itemsizes: bytes per number: c, r and those of a moment.
        data_ranks: number of ranks that have the same stages.
        device: kind of the device, for the update's workspace and gloo's copies.
        bucket_bytes: bytes of gradients that zero1 reduces at a time.
    """
    found = [
        _rank_peak(
            rank,
            stages,
            strategy,
            batch,
            looked_up + (0 if rank else gathered),
            itemsizes,
            data_ranks,
            device,
            bucket_bytes,
        )
        for rank in range(strategy.pipeline)
    ]
    return max(found, key=lambda peak: peak.total)


def stage_memories(
    segments: Sequence[Segment], layers_per_stage: Sequence[int], strategy: Strategy
) -> list[StageMemory]:
    """Returns all stages of a model, in their order."""
    again, every, found = recomputed(segments, strategy), stages_of(layers_per_stage), list[StageMemory]()
    for number, layers in enumerate(every):
        first, last = number == 0, number == len(every) - 1
        places = slice(layers.start + (not first), layers.stop + 1 + last)
        own = tuple(segments[places])
        activations, sent = Activations(own, again[places]), 0 if last else own[-1].footprint.output
        found.append(
            StageMemory(
                own,
                received=0 if first else found[-1].sent,
                sent=sent,
                kept=sum(activations.kept) + sent,
                forward=max(activations.forward) + sent,
                backward=max(activations.backward),
                parameters=sum(segment.parameters for segment in own),
            )
        )
    return found


def _rank_peak(
    rank: int,
    stages: Sequence[StageMemory],
    strategy: Strategy,
    batch: Batch,
    looked_up: int,
    itemsizes: Itemsizes,
    data_ranks: int,
    device: Literal["cpu", "cuda"],
    bucket_bytes: int,
) -> DensePeak:
    own = stages[rank :: strategy.pipeline]
    segments = [segment for stage in own for segment in stage.segments]
    values = sum(stage.parameters for stage in own)
    computed, reduced, moment_bytes = itemsizes
    buffers = sum(segment.buffer_bytes for segment in segments)
    wrapping = gradients = 0
    if strategy.dense == "zero1":
        zero = zero_state(segments, strategy, itemsizes, data_ranks, bucket_bytes)
        parameters, owned, buckets = zero.weights + zero.masters, zero.owned, zero.weights
        longest = max(zero.parts, default=0)
        sent = reduced * longest * data_ranks
        on_its_way = (
            reduced * longest + (sent if reduced != computed else 0) + (sent if device == "cpu" else 0)
        )
        flat = FP32_BYTES * owned
        wrapping = buffers + zero_wrapping_bytes(segments, itemsizes, zero)
    else:
        parameters = (FP32_BYTES + (computed if computed != FP32_BYTES else 0)) * values
        owned, buckets, gradients = values, 0, computed * values
        # gradients one after another, beside those of the model, and what is sent of them
        flat = FP32_BYTES * values
        on_its_way = reduced * values if data_ranks > 1 and reduced != FP32_BYTES else 0
    places = strategy.micro_batches * sum(stage.received + stage.sent for stage in own)
    first = rank == 0
    embeddings = looked_up + (batch.embeddings if first else 0)
    beside = batch.embeddings if first else 0  # their gradients
    workspace = update_workspace(itemsizes, owned, device)
    moments = [
        *_passes(rank, stages, strategy, gradients, beside),
        LiveMemory("optimizer step", 0, 0, gradients + flat, buffers=max(on_its_way, workspace)),
    ]
    peak = max(moments, key=total)
    return DensePeak(
        parameters=buffers + parameters,
        optimizer_state=len(MOMENTS) * moment_bytes * owned,
        buckets=buckets + places,
        batch=embeddings + batch.other,
        moment=peak,
        left=LiveMemory(TABLES_UPDATE, 0, 0, gradients),
        wrapping=wrapping,
        by_segment=((peak.at.partition(" of ")[2] or "stage", peak.activations),) if peak.activations else (),
        host=0,
    )


def _passes(
    rank: int, stages: Sequence[StageMemory], strategy: Strategy, gradients: int, beside: int
) -> Iterator[LiveMemory]:
    """Yields the passes in which most is held; gradients are there from the first backward on, and counted
    throughout."""
    own = stages[rank :: strategy.pipeline]
    kept = [stage.kept for stage in own]
    for kind, chunk, held in most_held(strategy.schedule, strategy.pipeline, strategy.micro_batches, rank):
        stage = own[chunk]
        before = sum(count * size for count, size in zip(held, kept, strict=True)) + beside
        if kind == "F":
            most, way = before + stage.forward, "forward"
        else:
            most, way = before + max(0, stage.backward - stage.kept), "backward"
        yield LiveMemory(f"{way} of stage {rank + chunk * strategy.pipeline}", 0, most, gradients)
