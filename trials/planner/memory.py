"""Peak memory of the dense part under a strategy, composed from its segments' footprints.

A step is a sequence of moments: forward of each segment, backward of each, what collectives do between them,
the update. At each moment the device holds the resident state, activations that earlier segments keep, the
running segment's own, what is gathered, and buffers; the peak is the largest sum. What the engines hold when
was read from PyTorch 2.13 and agrees with `reference`, which traces them (docs/benchmarks/planner-memory.md).

c is the bytes of a number in compute precision. Plain DP holds fp32 master weights, a copy in c where that is
not fp32, and gradients in c: in DDP's buckets with several ranks. `trials.planner.zero` has ZeRO's stages 1 and 2,
and ZeRO-Offload.
`fully_shard` holds fp32 shards, gathers a unit's parameters in c and reduces its gradients in r, the precision
in which gradients are sent. Between CPUs gloo reduces and scatters in a copy of what is sent, which is there until
the result has arrived; NCCL makes none. Evaluation has no moments of its own: it saves nothing for
backward, and goes forward with as many rows at a time as fit in a step's peak (`Pricing.evaluation_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from dhen.tape import FP32_BYTES, Shape
from trials.optim.adamw import CHUNKS, MOMENTS, WORKSPACE_BYTES
from trials.optim.one_bit_adam import Layout, LowRankSizes
from trials.planner.collectives import BUCKET_BYTES
from trials.planner.segments import Segment
from trials.planner.zero_memory import (
    TABLES_UPDATE,
    Activations,
    Batch,
    Itemsizes,
    LiveMemory,
    host_bytes,
    offload_left,
    total,
    zero_left,
    zero_moments,
    zero_offload_moments,
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


class Unit(NamedTuple):
    """Parameters of a segment, spread over ranks along their first dimension: counts of numbers, not
    bytes."""

    whole: int
    padded: int
    """The count as gathered, with each rank's shard as long as the longest."""
    shard: int
    """The count of the longest shard."""


@lru_cache(maxsize=4096)
def unit(shapes: tuple[Shape, ...], ranks: int) -> Unit:
    """Returns what `fully_shard` makes of parameters of these shapes."""
    count = shard = 0
    for rows, width in shapes:
        count += rows * width
        shard += -(-rows // ranks) * width
    return Unit(count, shard * ranks, shard)


def recomputed(segments: Sequence[Segment], strategy: Strategy) -> list[bool]:
    """Tells for each segment whether it is recomputed; only layers are, which stand between the first and the
    last segment."""
    again = range(1, len(segments) - 1)[RECOMPUTED[strategy.checkpointing]]
    return [index in again for index in range(len(segments))]


def dense_peak(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    *,
    itemsizes: Itemsizes,
    hosts: int,
    gpus_per_host: int,
    device: Literal["cpu", "cuda"] = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
    delayed: bool = False,
    one_bit: bool = False,
    low_rank: LowRankSizes | None = None,
) -> DensePeak:
    """Returns the dense part of the fullest rank, at the peak of a step after the first.

    Of one-bit Adam the stage counts that holds more.

    Args:
        segments: the model's segments at the micro-batch's size.
        activations: what these segments hold, with the strategy's checkpointing.
        strategy: how the dense part is held.
        batch: what the rank reads.
        itemsizes: bytes per number: c, r and those of a moment.
        hosts: number of hosts of the cluster.
        gpus_per_host: number of ranks per host.
        device: kind of the device; it decides how many numbers the update takes at once, and whether gloo or NCCL
            sends.
        bucket_bytes: bytes of gradients that DDP reduces at a time.
        delayed: whether updates go on while the next step runs (zero_offload).
        one_bit: whether the optimizer is one-bit Adam (dp and zero1).
        low_rank: what PowerSGD sends (dp alone); None without it.
    """
    ranks = hosts * gpus_per_host
    if one_bit and strategy.dense == "zero1":
        bucket_bytes = ALL_IN_ONE
    host = 0
    copies = device == "cpu" and ranks > 1
    buffers = sum(segment.buffer_bytes for segment in segments)
    wrapping = 0
    if strategy.fully_sharded:
        state = _fully_sharded_state(
            segments, itemsizes, gpus_per_host if strategy.dense == "hsdp" else ranks
        )
        workspace = update_workspace(itemsizes, max(state.numbers, default=0), device)
        walk = _walk(segments, activations, strategy, batch, itemsizes, state, copies=copies)
        moments = _fully_sharded(walk, strategy, 0 if strategy.offload else workspace)
        left = LiveMemory(TABLES_UPDATE, 0, 0, walk.on_device * state.shard_bytes)
        parameters, buckets = state.shard_bytes, 0
        optimizer = len(MOMENTS) * itemsizes.moment * state.shard_bytes // FP32_BYTES
    elif strategy.dense == "dp":
        values = sum(segment.parameters for segment in segments)
        computed = itemsizes.computed
        parameters = (FP32_BYTES + (computed if computed != FP32_BYTES else 0)) * values
        optimizer = len(MOMENTS) * itemsizes.moment * values
        buckets = computed * values if ranks > 1 else 0
        workspace = update_workspace(itemsizes, values, device)
        beside = 0
        if (
            low_rank is not None and buckets
        ):  # residues, P and Q stay; a bucket's copy and new residue lie beside
            sent = computed * (low_rank.p + low_rank.q)
            beside = POWER_SGD_COPIES * min(buckets, bucket_bytes + computed * low_rank.largest)
            buckets += computed * values + sent
        moments = _replicated(
            segments,
            activations,
            strategy,
            batch,
            itemsizes,
            bucket_bytes if buckets else 0,
            workspace,
            beside,
        )
        left = LiveMemory(TABLES_UPDATE, 0, 0, 0 if buckets else computed * values)
    elif strategy.dense == "zero_offload":
        zero = zero_state(segments, strategy, itemsizes, ranks, bucket_bytes)
        parameters, optimizer, buckets = zero.weights, 0, 0
        workspace = update_workspace(itemsizes, max(zero.parts, default=0), "cpu")
        host = host_bytes(zero, itemsizes, workspace, delayed=delayed)
        moments = zero_offload_moments(
            segments, activations, strategy, batch, itemsizes, zero, device, copies=copies
        )
        left = offload_left(itemsizes, zero, device)
    else:
        zero = zero_state(segments, strategy, itemsizes, ranks, bucket_bytes)
        parameters = zero.weights + zero.masters
        optimizer = len(MOMENTS) * itemsizes.moment * zero.owned
        buckets = zero.weights if strategy.dense == "zero1" else 0
        workspace = update_workspace(itemsizes, max(zero.parts, default=0), device)
        moments = zero_moments(
            segments, activations, strategy, batch, itemsizes, zero, workspace, copies=copies
        )
        left = zero_left(strategy, itemsizes, zero)
        wrapping = buffers + zero_wrapping_bytes(segments, itemsizes, zero)
    all_moments = list(moments)
    peak = max(all_moments, key=total)
    if strategy.offload:
        host = parameters + optimizer + parameters + workspace
    dense = DensePeak(
        parameters=buffers + (0 if strategy.offload else parameters),
        optimizer_state=0 if strategy.offload else optimizer,
        buckets=buckets,
        batch=batch.embeddings + batch.other,
        moment=peak,
        left=left,
        wrapping=wrapping,
        by_segment=activations.by_segment(segments, peak),
        host=host,
        moments=all_moments,
    )
    if not one_bit:
        return dense
    second = _second_stage(
        dense, segments, activations, strategy, batch, itemsizes, ranks, device, bucket_bytes
    )
    return max(dense, second, key=lambda each: each.total)


def _second_stage(
    first: DensePeak,
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    ranks: int,
    device: str,
    bucket_bytes: int,
) -> DensePeak:
    """Returns the dense part at the peak of one-bit Adam's second stage (`trials.optim.one_bit_adam`), or as it
    begins.

    What a rank carries and the variance's roots take the place of the moments, whole, with the residue of the
    chunk that it serves. Nothing but the compressed all-reduce is sent: gradients stay where backward makes them.
    """
    computed = itemsizes.computed
    values, masters = sum(segment.parameters for segment in segments), computed != FP32_BYTES
    layout, zero1 = Layout(values, ranks), strategy.dense == "zero1"
    flat, workspace = FP32_BYTES * values, layout.workspace_bytes(device)
    as_computed = itemsizes._replace(reduced=computed)
    moments = _replicated(
        segments, activations, strategy, batch, as_computed, bucket_bytes if ranks > 1 else 0, workspace
    )
    if zero1:  # gradients stay in the bucket and are cast to fp32 beside it
        passes = (moment for moment in moments if moment.at != UPDATE)
        part = FP32_BYTES * -(-values // ranks)
        gathered = (len(MOMENTS) + masters) * part  # own parts, beside what was gathered of them
        update = LiveMemory(UPDATE, 0, 0, gradients=flat if masters else 0, buffers=workspace)
        moments = iter((*passes, update, LiveMemory("freezing of the variance", 0, 0, buffers=gathered)))
    peak = max(moments, key=total)
    parameters = first.parameters
    if zero1 and masters:
        parameters += FP32_BYTES * (ranks - 1) * -(-values // ranks)
    return first._replace(
        parameters=parameters,
        optimizer_state=len(MOMENTS) * flat + FP32_BYTES * min(layout.chunk, values),
        moment=peak,
        left=LiveMemory(TABLES_UPDATE, 0, 0, 0 if ranks > 1 else computed * values),
        by_segment=activations.by_segment(segments, peak),
    )


def update_workspace(itemsizes: Itemsizes, numbers: int, device: str) -> int:
    """Returns what the update of so many consecutive numbers holds for a moment
    (`trials.optim.adamw`)."""
    return 0 if itemsizes.moment == FP32_BYTES else WORKSPACE_BYTES * min(CHUNKS[device], numbers)


def _cast_bytes(itemsizes: Itemsizes, gradient_bytes: int, bucket_bytes: int) -> int:
    """Returns the memory beside DDP's buckets where gradients are sent in another precision
    (`trials.training.distributed.parallelize`).

    It is that of one bucket where buckets are cast in place. It is that of all buckets where the numbers sent are
    larger than a bucket has room for, because possibly none has been reduced when backward ends.
    """
    computed, reduced, _ = itemsizes
    if reduced == computed or not bucket_bytes:
        return 0
    return reduced * (gradient_bytes if reduced > computed else min(gradient_bytes, bucket_bytes)) // computed


def _replicated(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    bucket_bytes: int,
    workspace: int,
    compressing: int = 0,
) -> Iterator[LiveMemory]:
    """Yields the moments of dp. One rank has no buckets (of 0 bytes): gradients appear as backward goes on.

    `compressing` is what the compression of a bucket's gradients takes beside it.
    """
    itemsize = itemsizes.computed
    several, in_buckets = strategy.micro_batches > 1, bucket_bytes > 0
    beside = batch.embeddings if several else 0
    gradient_bytes = itemsize * sum(segment.parameters for segment in segments)
    cast = _cast_bytes(itemsizes, gradient_bytes, bucket_bytes) + compressing
    gradients_so_far = gradient_bytes if several and not in_buckets else 0
    ready = 0
    for index, segment in enumerate(segments):
        yield LiveMemory(
            f"forward of {segment.name}",
            index,
            activations.forward[index] + beside,
            gradients=gradients_so_far,
        )
    for index in reversed(range(len(segments))):
        own = 0 if in_buckets or several else activations.backward_gradients[index]
        ready += itemsize * segments[index].parameters
        yield LiveMemory(
            f"backward of {segments[index].name}",
            index,
            activations.backward[index] + beside,
            gradients=gradients_so_far + own,
            buffers=cast if bucket_bytes and ready >= bucket_bytes else 0,
        )
        if not in_buckets and not several:
            gradients_so_far += itemsize * segments[index].parameters
    embeddings = batch.embeddings if several else batch.micro_embeddings
    yield LiveMemory("all-reduce", 0, embeddings, gradients=gradients_so_far, buffers=cast)
    flat, own = FP32_BYTES * gradient_bytes // itemsize, 0 if in_buckets else gradient_bytes
    yield LiveMemory(UPDATE, 0, 0, gradients=flat + own)
    yield LiveMemory(UPDATE, 0, 0, gradients=flat, buffers=workspace)


class _Sharded(NamedTuple):
    """Sizes of each segment in bytes; the first and the last segment together are the root."""

    gathered: list[int]
    """Parameters as they are gathered."""
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
    numbers: list[int]
    """Count of numbers in the longest shard of each single parameter."""
    shard_bytes: int
    """Bytes of all shards together, in fp32."""
    ranks: int
    """Number of ranks that share a unit."""


def _fully_sharded_state(segments: Sequence[Segment], itemsizes: Itemsizes, ranks: int) -> _Sharded:
    units = [unit(segment.shapes, ranks) for segment in segments]
    shards = [FP32_BYTES * unit_size.shard for unit_size in units]
    itemsize, reduced, _ = itemsizes
    low = 0 if reduced == FP32_BYTES else reduced
    return _Sharded(
        gathered=[itemsize * unit_size.padded for unit_size in units],
        whole=[itemsize * unit_size.whole for unit_size in units],
        shards=shards,
        low=[itemsize * unit_size.shard for unit_size in units],
        reduced=[reduced * unit_size.padded for unit_size in units],
        reduced_low=[low * unit_size.shard for unit_size in units],
        numbers=[-(-rows // ranks) * width for segment in segments for rows, width in segment.shapes],
        shard_bytes=sum(shards),
        ranks=ranks,
    )


class _Walk(NamedTuple):
    """What the passes of shard_grad_op, fsdp and hsdp through the segments need to know; sizes are in bytes."""

    segments: Sequence[Segment]
    activations: Activations
    state: _Sharded
    dense: str
    itemsizes: Itemsizes
    several: bool
    """Whether a step has several micro-batches."""
    no_sync: bool
    """Whether gradients stay whole until the last micro-batch."""
    on_device: int
    """0 where shards and their gradients live in the host's memory, else 1."""
    batch: Batch
    copies: bool
    """Whether gloo's copies of what is reduced and scattered count."""

    @property
    def last(self) -> int:
        """Index of the head."""
        return len(self.segments) - 1

    @property
    def root(self) -> int:
        """Gathered parameters of features and head."""
        return self.state.gathered[0] + self.state.gathered[self.last]

    @property
    def arriving(self) -> list[int]:
        """The all-gather's output for each segment, apart from the parameters."""
        return [0 if self.state.ranks == 1 else size for size in self.state.gathered]

    @property
    def beside(self) -> int:
        """Embeddings of all micro-batches, alive beside the running one; 0 with one micro-batch."""
        return self.batch.embeddings if self.several else 0

    @property
    def accumulated(self) -> list[int]:
        """Gradients of the micro-batches before, by segment; 0 with one micro-batch.

        Whole ones are in the precision in which they are sent. What hsdp has yet to all-reduce are shards in that
        precision, and on the device also where gradients are offloaded.
        """
        if not self.several:
            return [0] * len(self.segments)
        if self.no_sync:
            computed, reduced, _ = self.itemsizes
            return [size * reduced // computed for size in self.state.whole]
        if self.dense == "hsdp":
            return [size // self.state.ranks for size in self.state.reduced]
        return [self.on_device * size for size in self.state.shards]


def _walk(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    state: _Sharded,
    *,
    copies: bool,
) -> _Walk:
    """Returns what a strategy says about the passes through the segments."""
    return _Walk(
        segments,
        activations,
        state,
        strategy.dense,
        itemsizes,
        several=strategy.micro_batches > 1,
        no_sync=strategy.no_sync and strategy.micro_batches > 1,
        on_device=0 if strategy.offload else 1,
        batch=batch,
        copies=copies,
    )


def _fully_sharded(walk: _Walk, strategy: Strategy, workspace: int) -> Iterator[LiveMemory]:
    """Yields the moments of shard_grad_op, fsdp and hsdp, unit by unit: the layers, and the root (features and
    head)."""
    yield from _sharded_forward(walk)
    yield from _sharded_backward(walk)
    if walk.dense == "hsdp" and not walk.on_device and strategy.micro_batches > 2 and not walk.no_sync:
        yield from _sharded_backward(walk, last=False)
    yield LiveMemory(UPDATE, 0, 0, walk.on_device * walk.state.shard_bytes, buffers=workspace)


def _sharded_forward(walk: _Walk) -> Iterator[LiveMemory]:
    gathered, arriving, root = walk.state.gathered, walk.arriving, walk.root
    flattened = walk.itemsizes.computed != FP32_BYTES and walk.state.ranks > 1
    accumulated = sum(walk.accumulated)

    def moment(index: int, unsharded: int, buffers: int, stage: str = "forward of") -> LiveMemory:
        own_bytes = walk.activations.forward if stage == "forward of" else walk.activations.after_backward
        at, running = f"{stage} {walk.segments[index].name}", own_bytes[index] + walk.beside
        return LiveMemory(at, index, running, accumulated, unsharded, buffers)

    gathered_so_far = 0  # gathered parameters of the layers so far (shard_grad_op)
    previous = 0 if walk.state.ranks == 1 else root
    yield moment(0, root, previous)
    for index in range(1, walk.last):
        flat = walk.state.low[index] if flattened else 0
        yield moment(index, root + gathered_so_far, previous + arriving[index] + flat, "all-gather of")
        if (
            walk.dense == "shard_grad_op"
        ):  # what arrived before is still there while parameters are copied to their places
            copied = root + gathered_so_far + gathered[index]
            yield moment(index, copied, previous + arriving[index], "all-gather of")
        yield moment(index, root + gathered_so_far + gathered[index], arriving[index])
        previous = arriving[index]
        gathered_so_far += gathered[index] if walk.dense == "shard_grad_op" else 0
    yield moment(walk.last, root + gathered_so_far, previous)


def _sharded_backward(walk: _Walk, *, last: bool = True) -> Iterator[LiveMemory]:
    """Yields the moments of the last micro-batch's backward, which ends with gradients of all micro-batches.

    With `last=False` those of one between the first and the last: what hsdp adds up stays on the device. In the
    last one it goes to the host, layer by layer, where gradients are offloaded.
    """
    state, shard_grad_op, accumulated = walk.state, walk.dense == "shard_grad_op", walk.accumulated
    root, arriving = walk.root, walk.arriving
    unsharded = root + (sum(state.gathered[1 : walk.last]) if shard_grad_op else 0)
    gradients_so_far = sum(accumulated)
    # whole gradients of one precision are added up in place, weight by weight
    in_place = walk.no_sync and walk.itemsizes.reduced == walk.itemsizes.computed
    reducing = loose = 0
    all_reduced = 0  # hsdp keeps what every unit's all-reduce puts out until the end of backward
    for index in reversed(range(len(walk.segments))):
        name, layer = walk.segments[index].name, 0 < index < walk.last
        if layer and not shard_grad_op:
            unsharded = root + state.gathered[index]
        ahead = 0 if shard_grad_op or index <= 1 else arriving[index - 1]
        running = walk.activations.backward[index] + walk.beside
        own = 0 if in_place else walk.activations.backward_gradients[index]
        gradients, buffers = gradients_so_far + loose + own, ahead + reducing + all_reduced
        yield LiveMemory(f"backward of {name}", index, running, gradients, unsharded, buffers)
        whole = 0 if in_place else state.whole[index]
        if not layer:
            loose += whole  # the root's gradients wait for its features'
            continue
        unsharded -= state.gathered[index]
        at, after = f"reduce-scatter of {name}", walk.activations.after_backward[index] + walk.beside
        if walk.no_sync:  # this micro-batch's gradients are added to those before, which are what is sent
            yield LiveMemory(at, index, after, gradients_so_far + loose + whole, unsharded, buffers)
            whole = accumulated[index]
            gradients_so_far -= whole
        reducing, low = state.reduced[index], state.reduced_low[index]
        shard, copy = state.shards[index], reducing if walk.copies else 0
        # in fp32 what is put out is the gradient itself
        arriving_shard = (0 if low else shard, low + copy)
        for gradient, output in ((whole, 0), arriving_shard, *(((shard, low),) if last else ())):
            gradients, buffers = gradients_so_far + loose + gradient, ahead + reducing + all_reduced + output
            yield LiveMemory(at, index, after, gradients, unsharded, buffers)
        gradients_so_far += _kept_gradients(walk, index) if last else 0
        # in fp32 the output is the gradient itself
        all_reduced += low if walk.dense == "hsdp" and last else 0
    embeddings = walk.batch.embeddings if walk.several else walk.batch.micro_embeddings
    sent = state.reduced[0] + state.reduced[walk.last]
    if walk.no_sync:
        yield LiveMemory(
            "reduce-scatter of the root", 0, embeddings, gradients_so_far + loose, 0, all_reduced
        )
        loose = 0
    copied = (sent if walk.copies else 0) + state.reduced_low[0] + state.reduced_low[walk.last]
    arrived = 0 if state.reduced_low[walk.last] else state.shards[0] + state.shards[walk.last]
    for gradients, buffers in ((loose, sent), (arrived, sent + copied)):
        yield LiveMemory(
            "reduce-scatter of the root",
            0,
            embeddings,
            gradients_so_far + gradients,
            0,
            buffers + all_reduced,
        )


def _kept_gradients(walk: _Walk, index: int) -> int:
    """Returns by how much a layer's gradients are more, once the last micro-batch has reduced them, than before.

    Shards that are reduced in every micro-batch have been there since the first one.
    """
    shard = walk.on_device * walk.state.shards[index]
    if not walk.several or walk.no_sync:
        return shard
    return shard - walk.accumulated[index]
