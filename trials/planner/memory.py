"""Peak memory of the dense part under a strategy, composed from its segments' footprints.

A step is a sequence of moments: forward of each segment, backward of each, what collectives do between them,
the update. At each moment the device holds the resident state, activations that earlier segments keep, the
running segment's own, what is gathered, and buffers; the peak is the largest sum. What the engines hold when
was read from PyTorch 2.13 and agrees with `reference`, which traces them (docs/benchmarks/planner-memory.md).

c is the bytes of a number in compute precision. Plain DP holds fp32 master weights, a copy in c if that is
not fp32, and gradients in c: in DDP's buckets with several ranks. `trials.planner.zero_memory` has ZeRO's stages 1
and 2, and ZeRO-Offload.
`fully_shard` holds fp32 shards, gathers a unit's parameters in c and reduces its gradients in r, the precision
in which gradients are sent. Between CPUs gloo reduces and scatters in a copy of what is sent, which is there until
the result has arrived; NCCL makes none. Evaluation has no moments of its own: it saves nothing for
backward, and goes forward with as many rows at a time as fit in a step's peak (`CostModel.evaluation_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from dhen.tape import FP32_BYTES, Shape
from trials.optim.adamw import CHUNKS, MOMENTS, WORKSPACE_BYTES
from trials.optim.one_bit_adam import ChunkLayout
from trials.planner.segments import Segment
from trials.planner.zero_memory import (
    TABLES_UPDATE,
    DenseRank,
    Itemsizes,
    LiveMemory,
    host_bytes,
    total,
    zero_left,
    zero_moments,
    zero_state,
    zero_wrapping_bytes,
)
from trials.records.strategy import RECOMPUTED, Strategy

UPDATE = "optimizer step"
"""Name of the moment of the dense part's update."""
ALL_IN_ONE = 2**62
"""Bytes of a bucket that no model fills: zero1 has one for all weights with one-bit Adam."""
POWER_SGD_COPIES = 2
"""Copies of a bucket while PowerSGD compresses it: the gradients as they were, and what was lost of them."""


class DensePeak(NamedTuple):
    """The dense part of a rank at its peak, in bytes."""

    parameters: int
    optimizer_state: int
    buckets: int
    """DDP's buckets, which are alive all the time."""
    batch: int
    """Embeddings that were looked up, numeric inputs and labels."""
    moment: LiveMemory
    left: LiveMemory
    """Gradients and buffers between backward and the update, while tables are updated."""
    wrapping: int
    """What the device holds at most while ranks take the model over, before the first step; 0 if a step holds
    more for certain."""
    by_segment: tuple[tuple[str, int], ...]
    """Activations at the moment of the peak, by segment."""
    host: int
    moments: Sequence[LiveMemory] = ()
    """All moments of a step; none of a pipeline's."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.parameters + self.optimizer_state + self.buckets + self.batch + self.moment.total


class ParameterUnit(NamedTuple):
    """Parameters of a segment, spread over ranks along their first dimension: counts of numbers, not
    bytes."""

    whole: int
    padded: int
    """The count as gathered, with each rank's shard as long as the longest."""
    shard: int
    """The count of the longest shard."""


@lru_cache(maxsize=4096)
def unit(shapes: tuple[Shape, ...], ranks: int) -> ParameterUnit:
    """Returns what `fully_shard` makes of parameters of these shapes."""
    count = shard = 0
    for rows, width in shapes:
        count += rows * width
        shard += -(-rows // ranks) * width
    return ParameterUnit(count, shard * ranks, shard)


def recomputed(segments: Sequence[Segment], strategy: Strategy) -> list[bool]:
    """Tells for each segment whether it is recomputed; only layers are, which stand between the first and the
    last segment."""
    again = range(1, len(segments) - 1)[RECOMPUTED[strategy.checkpointing]]
    return [index in again for index in range(len(segments))]


def dense_peak(rank: DenseRank) -> DensePeak:
    """Returns the dense part of the fullest rank, at the peak of a step after the first.

    Of one-bit Adam the stage counts that holds more.
    """
    strategy, itemsizes, device, values = rank.strategy, rank.itemsizes, rank.device, rank.values
    computed, _, moment_bytes = itemsizes
    if rank.one_bit and strategy.dense == "zero1":
        rank = rank._replace(bucket_bytes=ALL_IN_ONE)
    host = wrapping = buckets = 0
    buffers = sum(segment.buffer_bytes for segment in rank.segments)
    if strategy.fully_sharded:
        state = _sharded(rank)
        workspace = update_workspace(itemsizes, state.longest, device)
        moments = _fully_sharded(rank, state, 0 if strategy.offload else workspace)
        left = LiveMemory(TABLES_UPDATE, 0, 0, state.on_device * state.shard_bytes)
        parameters = state.shard_bytes
        optimizer = len(MOMENTS) * moment_bytes * state.shard_bytes // FP32_BYTES
    elif strategy.dense == "dp":
        parameters = (FP32_BYTES + (computed if computed != FP32_BYTES else 0)) * values
        optimizer = len(MOMENTS) * moment_bytes * values
        buckets = computed * values if rank.ranks > 1 else 0
        workspace = update_workspace(itemsizes, values, device)
        bucket_bytes, compressing = rank.bucket_bytes if buckets else 0, 0
        if rank.low_rank is not None and buckets:
            # residues, P and Q stay; a bucket's copy and new residue lie beside
            sent = computed * (rank.low_rank.p + rank.low_rank.q)
            largest = bucket_bytes + computed * rank.low_rank.largest
            compressing = POWER_SGD_COPIES * min(buckets, largest)
            buckets += computed * values + sent
        moments = _replicated(rank, bucket_bytes, workspace, compressing)
        left = LiveMemory(TABLES_UPDATE, 0, 0, 0 if buckets else computed * values)
    else:
        offload = strategy.dense == "zero_offload"
        zero = zero_state(rank.segments, strategy, itemsizes, rank.ranks, rank.bucket_bytes)
        workspace = update_workspace(itemsizes, max(zero.parts, default=0), "cpu" if offload else device)
        moments, left = zero_moments(rank, zero, workspace), zero_left(rank, zero)
        parameters = zero.weights + zero.masters
        optimizer = 0 if offload else len(MOMENTS) * moment_bytes * zero.owned
        buckets = zero.weights if strategy.dense == "zero1" else 0
        if offload:
            host = host_bytes(rank, zero, workspace)
        else:
            wrapping = buffers + zero_wrapping_bytes(rank.segments, itemsizes, zero)
    all_moments = list(moments)
    peak = max(all_moments, key=total)
    if strategy.offload:
        host = parameters + optimizer + parameters + workspace
    dense = DensePeak(
        parameters=buffers + (0 if strategy.offload else parameters),
        optimizer_state=0 if strategy.offload else optimizer,
        buckets=buckets,
        batch=rank.batch.embeddings + rank.batch.other,
        moment=peak,
        left=left,
        wrapping=wrapping,
        by_segment=rank.activations.by_segment(rank.segments, peak),
        host=host,
        moments=all_moments,
    )
    if not rank.one_bit:
        return dense
    return max(dense, _second_stage(dense, rank), key=lambda each: each.total)


def _second_stage(first: DensePeak, rank: DenseRank) -> DensePeak:
    """Returns the dense part at the peak of one-bit Adam's second stage (`trials.optim.one_bit_adam`), or as it
    begins.

    What a rank carries and the variance's roots take the place of the moments, whole, with the residue of the
    chunk that it serves. Nothing but the compressed all-reduce is sent: gradients stay where backward makes them.
    """
    computed, values, ranks = rank.itemsizes.computed, rank.values, rank.ranks
    masters, zero1 = computed != FP32_BYTES, rank.strategy.dense == "zero1"
    layout, flat, part = ChunkLayout(values, ranks), FP32_BYTES * values, FP32_BYTES * -(-values // ranks)
    workspace = layout.workspace_bytes(rank.device)
    uncast = rank._replace(itemsizes=rank.itemsizes._replace(reduced=computed))
    moments = _replicated(uncast, rank.bucket_bytes if ranks > 1 else 0, workspace)
    if zero1:  # gradients stay in the bucket and are cast to fp32 beside it
        passes = (moment for moment in moments if moment.at != UPDATE)
        gathered = (len(MOMENTS) + masters) * part  # own parts, beside what was gathered of them
        update = LiveMemory(UPDATE, 0, 0, gradients=flat if masters else 0, buffers=workspace)
        moments = iter((*passes, update, LiveMemory("freezing of the variance", 0, 0, buffers=gathered)))
    peak = max(moments, key=total)
    return first._replace(
        parameters=first.parameters + ((ranks - 1) * part if zero1 and masters else 0),
        optimizer_state=len(MOMENTS) * flat + FP32_BYTES * min(layout.chunk, values),
        moment=peak,
        left=LiveMemory(TABLES_UPDATE, 0, 0, 0 if ranks > 1 else computed * values),
        by_segment=rank.activations.by_segment(rank.segments, peak),
    )


def update_workspace(itemsizes: Itemsizes, numbers: int, device: str) -> int:
    """Returns what the update of so many consecutive numbers holds for a moment
    (`trials.optim.adamw`)."""
    return 0 if itemsizes.moment == FP32_BYTES else WORKSPACE_BYTES * min(CHUNKS[device], numbers)


def _replicated(
    rank: DenseRank, bucket_bytes: int, workspace: int, compressing: int = 0
) -> Iterator[LiveMemory]:
    """Yields the moments of dp. One rank has no buckets (of 0 bytes): gradients appear as backward goes on.

    `compressing` is what the compression of a bucket's gradients takes beside it.
    """
    itemsize, activations, several = rank.itemsizes.computed, rank.activations, rank.several
    gradient_bytes = itemsize * rank.values
    _, sent, _ = rank.itemsizes
    cast = compressing
    if sent != itemsize and bucket_bytes:
        # gradients are sent in another precision (`trials.training.distributed.parallelize`): beside one bucket if
        # buckets are cast in place; beside all if numbers sent are larger than a bucket has room for, because
        # possibly none has been reduced when backward ends
        cast += sent * (gradient_bytes if sent > itemsize else min(gradient_bytes, bucket_bytes)) // itemsize
    gradients_so_far = gradient_bytes if several and not bucket_bytes else 0
    ready = 0
    yield from rank.forward(gradients_so_far)
    for index in reversed(range(len(rank.segments))):
        segment = rank.segments[index]
        own = 0 if bucket_bytes or several else activations.backward_gradients[index]
        ready += itemsize * segment.parameters
        yield LiveMemory(
            f"backward of {segment.name}",
            index,
            activations.backward[index] + rank.beside,
            gradients=gradients_so_far + own,
            buffers=cast if bucket_bytes and ready >= bucket_bytes else 0,
        )
        if not bucket_bytes and not several:
            gradients_so_far += itemsize * segment.parameters
    yield LiveMemory("all-reduce", 0, rank.last_embeddings, gradients=gradients_so_far, buffers=cast)
    flat, own = FP32_BYTES * gradient_bytes // itemsize, 0 if bucket_bytes else gradient_bytes
    yield LiveMemory(UPDATE, 0, 0, gradients=flat + own)
    yield LiveMemory(UPDATE, 0, 0, gradients=flat, buffers=workspace)


class _Sharded(NamedTuple):
    """Sizes of each segment in bytes; the first and the last segment together are the root."""

    gathered: list[int]
    """Parameters as they are gathered."""
    arriving: list[int]
    """The all-gather's output, apart from the parameters."""
    whole: list[int]
    """Gradients as autograd makes them, before they are reduced."""
    shards: list[int]
    """A rank's shards in fp32."""
    low: list[int]
    """A shard in compute precision, on its way into the all-gather."""
    reduced: list[int]
    """Padded gradients as they are sent."""
    reduced_low: list[int]
    """A shard of the gradients as they are sent; 0 in fp32, where the shard becomes the gradient itself."""
    accumulated: list[int]
    """Gradients of the micro-batches before; 0 with one micro-batch.

    Whole ones are in the precision in which they are sent. What hsdp has yet to all-reduce are shards in that
    precision, and on the device also if gradients are offloaded.
    """
    longest: int
    """Count of numbers in the longest shard of a single parameter."""
    ranks: int
    """Number of ranks that share a unit."""
    on_device: bool
    """Whether shards and their gradients live on the device, not in the host's memory."""
    no_sync: bool
    """Whether gradients stay whole until the last of several micro-batches."""

    @property
    def shard_bytes(self) -> int:
        """Bytes of all shards together, in fp32."""
        return sum(self.shards)

    @property
    def root(self) -> int:
        """Gathered parameters of features and head."""
        return self.gathered[0] + self.gathered[-1]


def _sharded(rank: DenseRank) -> _Sharded:
    strategy, hsdp = rank.strategy, rank.strategy.dense == "hsdp"
    ranks = rank.gpus_per_host if hsdp else rank.ranks
    no_sync, on_device = strategy.no_sync and rank.several, not strategy.offload
    units = [unit(segment.shapes, ranks) for segment in rank.segments]
    itemsize, sent, _ = rank.itemsizes
    gathered = [itemsize * each.padded for each in units]
    reduced = [sent * each.padded for each in units]
    shards = [FP32_BYTES * each.shard for each in units]
    accumulated = [0] * len(units)
    if no_sync:
        accumulated = [sent * each.whole for each in units]
    elif rank.several:
        accumulated = [size // ranks for size in reduced] if hsdp else [on_device * size for size in shards]
    return _Sharded(
        gathered=gathered,
        arriving=[0] * len(units) if ranks == 1 else gathered,
        whole=[itemsize * each.whole for each in units],
        shards=shards,
        low=[itemsize * each.shard for each in units],
        reduced=reduced,
        reduced_low=[0 if sent == FP32_BYTES else sent * each.shard for each in units],
        accumulated=accumulated,
        longest=max(
            (-(-rows // ranks) * width for segment in rank.segments for rows, width in segment.shapes),
            default=0,
        ),
        ranks=ranks,
        on_device=on_device,
        no_sync=no_sync,
    )


def _fully_sharded(rank: DenseRank, state: _Sharded, workspace: int) -> Iterator[LiveMemory]:
    """Yields the moments of shard_grad_op, fsdp and hsdp, unit by unit: the layers, and the root (features and
    head)."""
    yield from _sharded_forward(rank, state)
    yield from _sharded_backward(rank, state)
    hsdp = rank.strategy.dense == "hsdp"
    if hsdp and not state.on_device and rank.strategy.micro_batches > 2 and not state.no_sync:
        yield from _sharded_backward(rank, state, last=False)
    yield LiveMemory(UPDATE, 0, 0, state.on_device * state.shard_bytes, buffers=workspace)


def _sharded_forward(rank: DenseRank, state: _Sharded) -> Iterator[LiveMemory]:
    gathered, arriving, root = state.gathered, state.arriving, state.root
    keeps, head = rank.strategy.dense == "shard_grad_op", len(rank.segments) - 1
    flattened = rank.itemsizes.computed != FP32_BYTES and state.ranks > 1
    accumulated = sum(state.accumulated)

    def moment(index: int, unsharded: int, buffers: int, stage: str = "forward of") -> LiveMemory:
        held = rank.activations.forward if stage == "forward of" else rank.activations.after_backward
        at, running = f"{stage} {rank.segments[index].name}", held[index] + rank.beside
        return LiveMemory(at, index, running, accumulated, unsharded, buffers)

    gathered_so_far = 0  # gathered parameters of the layers so far (shard_grad_op)
    previous = 0 if state.ranks == 1 else root
    yield moment(0, root, previous)
    for index in range(1, head):
        flat = state.low[index] if flattened else 0
        yield moment(index, root + gathered_so_far, previous + arriving[index] + flat, "all-gather of")
        copied = root + gathered_so_far + gathered[index]
        if keeps:  # what arrived before is still there while parameters are copied to their places
            yield moment(index, copied, previous + arriving[index], "all-gather of")
        yield moment(index, copied, arriving[index])
        previous = arriving[index]
        gathered_so_far += gathered[index] if keeps else 0
    yield moment(head, root + gathered_so_far, previous)


def _sharded_backward(rank: DenseRank, state: _Sharded, *, last: bool = True) -> Iterator[LiveMemory]:
    """Yields the moments of the last micro-batch's backward, which ends with gradients of all micro-batches.

    With `last=False` those of one between the first and the last: what hsdp adds up stays on the device. In the
    last one it goes to the host, layer by layer, if gradients are offloaded.
    """
    shard_grad_op, hsdp = rank.strategy.dense == "shard_grad_op", rank.strategy.dense == "hsdp"
    root, arriving, no_sync, head = state.root, state.arriving, state.no_sync, len(rank.segments) - 1
    unsharded = root + (sum(state.gathered[1:head]) if shard_grad_op else 0)
    gradients_so_far = sum(state.accumulated)
    # whole gradients of one precision are added up in place, weight by weight
    in_place = no_sync and rank.itemsizes.reduced == rank.itemsizes.computed
    reducing = loose = 0
    all_reduced = 0  # hsdp keeps what every unit's all-reduce puts out until the end of backward
    for index in reversed(range(len(rank.segments))):
        name, layer = rank.segments[index].name, 0 < index < head
        if layer and not shard_grad_op:
            unsharded = root + state.gathered[index]
        ahead = 0 if shard_grad_op or index <= 1 else arriving[index - 1]
        running = rank.activations.backward[index] + rank.beside
        own = 0 if in_place else rank.activations.backward_gradients[index]
        gradients, buffers = gradients_so_far + loose + own, ahead + reducing + all_reduced
        yield LiveMemory(f"backward of {name}", index, running, gradients, unsharded, buffers)
        whole = 0 if in_place else state.whole[index]
        if not layer:
            loose += whole  # the root's gradients wait for its features'
            continue
        unsharded -= state.gathered[index]
        at, after = f"reduce-scatter of {name}", rank.activations.after_backward[index] + rank.beside
        if no_sync:  # this micro-batch's gradients are added to those before, which are what is sent
            yield LiveMemory(at, index, after, gradients_so_far + loose + whole, unsharded, buffers)
            whole = state.accumulated[index]
            gradients_so_far -= whole
        reducing, low = state.reduced[index], state.reduced_low[index]
        shard, copy = state.shards[index], reducing if rank.copies else 0
        # in fp32 what is put out is the gradient itself
        arriving_shard = (0 if low else shard, low + copy)
        for gradient, output in ((whole, 0), arriving_shard, *(((shard, low),) if last else ())):
            gradients, buffers = gradients_so_far + loose + gradient, ahead + reducing + all_reduced + output
            yield LiveMemory(at, index, after, gradients, unsharded, buffers)
        if last:
            # shards that are reduced in every micro-batch have been there since the first one
            gradients_so_far += state.on_device * shard - (0 if no_sync else state.accumulated[index])
            # in fp32 the output is the gradient itself
            all_reduced += low if hsdp else 0
    at, embeddings = "reduce-scatter of the root", rank.last_embeddings
    if no_sync:
        yield LiveMemory(at, 0, embeddings, gradients_so_far + loose, 0, all_reduced)
        loose = 0
    sent, low = state.reduced[0] + state.reduced[head], state.reduced_low[0] + state.reduced_low[head]
    copied = (sent if rank.copies else 0) + low
    arrived = 0 if state.reduced_low[head] else state.shards[0] + state.shards[head]
    for gradients, buffers in ((loose, sent), (arrived, sent + copied)):
        yield LiveMemory(at, 0, embeddings, gradients_so_far + gradients, 0, buffers + all_reduced)
