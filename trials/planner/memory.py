"""Peak memory of the dense part under a strategy, composed from its segments' footprints.

A step is a sequence of moments: forward of each segment, backward of each, what collectives do between them,
the update. At each moment the device holds the resident state, activations that earlier segments keep, the
running segment's own, what is gathered, and buffers; the peak is the largest sum. What the engines hold when
was read from PyTorch 2.13 and agrees with `reference`, which traces them (docs/benchmarks/planner-memory.md).

c is the bytes of a number in compute precision. Replicated engines (dp, zero1) hold fp32 master weights, a
copy in c where that is not fp32, and gradients in c: in DDP's buckets with several ranks. `fully_shard`
holds fp32 shards, gathers a unit's parameters in c and reduces its gradients in r, the precision in which
gradients are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from dhen.memory.tape import FP32_BYTES, Shape
from trials.job import TrainingConfig
from trials.optim.bf16_adamw import CHUNKS, WORKSPACE_BYTES
from trials.planner.device_constants import BUCKET_BYTES
from trials.planner.segments import ITEMSIZES, Segment
from trials.strategy import RECOMPUTED, Strategy

MOMENTS = 2
"""AdamW's."""


class Itemsizes(NamedTuple):
    """Bytes of a number of the dense part."""

    computed: int
    """Weights as the model computes with them, gradients, activations: c."""
    reduced: int
    """Gradients between ranks: r."""
    moment: int
    """Of the optimizer's state."""

    @classmethod
    def of(cls, training: TrainingConfig) -> Itemsizes:
        """Whose precision is resolved."""
        assert training.precision != "auto"
        reduced = training.reduction_precision(training.precision)
        return cls(*(ITEMSIZES[each] for each in (training.precision, reduced, training.optimizer_precision)))


class Batch(NamedTuple):
    """A rank's input, in bytes."""

    embeddings: int
    """Looked up, fp32; their gradient takes as much."""
    micro_embeddings: int
    """The same of one micro-batch."""
    other: int
    """Numbers and labels."""


class LiveMemory(NamedTuple):
    """What is alive beside the resident state."""

    at: str
    segment: int
    """Up to which segments keep activations."""
    activations: int
    gradients: int = 0
    unsharded: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return _total(self)


def _total(moment: LiveMemory) -> int:
    return moment[2] + moment[3] + moment[4] + moment[5]


class DensePeak(NamedTuple):
    """The dense part of a rank at its peak, in bytes."""

    parameters: int
    optimizer_state: int
    buckets: int
    """DDP's, alive all the time."""
    batch: int
    """Embeddings looked up, numbers and labels."""
    moment: LiveMemory
    by_segment: tuple[tuple[str, int], ...]
    """Activations of the moment, by segment."""
    host: int

    @property
    def total(self) -> int:
        """On the device."""
        return self.parameters + self.optimizer_state + self.buckets + self.batch + self.moment.total


class Unit(NamedTuple):
    """Parameters of a segment, spread over ranks along their first dimension: numbers, not bytes."""

    whole: int
    padded: int
    """As gathered: each rank's shard as long as the longest."""
    shard: int
    """The longest."""


@lru_cache(maxsize=4096)
def unit(shapes: tuple[Shape, ...], ranks: int) -> Unit:
    """What `fully_shard` makes of parameters of these shapes."""
    whole = shard = 0
    for rows, width in shapes:
        whole += rows * width
        shard += -(-rows // ranks) * width
    return Unit(whole, shard * ranks, shard)


class Activations:
    """What segments hold at each moment, for one micro-batch size and checkpointing."""

    def __init__(self, segments: Sequence[Segment], recomputed: Sequence[bool]) -> None:
        prints = [segment.footprint for segment in segments]
        inputs = [0, *(each.input for each in prints[1:])]  # the first one's are the batch
        each_one = list(zip(prints, inputs, recomputed, strict=True))
        self.kept = [size if again else each.kept for each, size, again in each_one]
        self.before = [0, *accumulate(self.kept)][:-1]
        """Kept by the segments before."""
        self.forward, self.backward, self.backward_gradients, self.after_backward = [], [], [], []
        for base, (each, size, again) in zip(self.before, each_one, strict=True):
            peak, with_gradients = each.backward_peak, each.backward_peak_with_gradients
            if again:
                recomputation = size + each.forward_peak + each.output
                peak = max(recomputation, each.recomputed_peak)
                with_gradients = max(recomputation, each.recomputed_peak_with_gradients)
            self.forward.append(base + size + (each.discarding_peak if again else each.forward_peak))
            self.backward.append(base + peak)
            self.backward_gradients.append(with_gradients - peak)
            self.after_backward.append(base + size)  # the gradient of its input

    def by_segment(self, segments: Sequence[Segment], moment: LiveMemory) -> tuple[tuple[str, int], ...]:
        """A moment's activations, to whom they belong."""
        last = moment.segment
        found = [(segments[i].name, self.kept[i]) for i in range(last)]
        return (*found, (segments[last].name, moment.activations - sum(size for _, size in found)))


def recomputed(segments: Sequence[Segment], strategy: Strategy) -> list[bool]:
    """Which segments are; layers stand between the first and the last."""
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
) -> DensePeak:
    """The fullest rank's dense part at the peak of a step after the first.

    Args:
        segments: at the micro-batch's size.
        activations: of these segments, with the strategy's checkpointing.
        strategy: how the dense part is held.
        batch: what the rank reads.
        itemsizes: c, r and the moments'.
        hosts: of the cluster.
        gpus_per_host: ranks on each.
        device: that updates so many numbers at a time.
        bucket_bytes: gradients that DDP reduces at a time.
    """
    ranks = hosts * gpus_per_host
    buffers = sum(segment.buffer_bytes for segment in segments)
    if strategy.fully_sharded:
        state = _fully_sharded_state(
            segments, itemsizes, gpus_per_host if strategy.dense == "hsdp" else ranks
        )
        workspace = _update_workspace(itemsizes, max(state.numbers, default=0), device)
        moments = _fully_sharded(
            segments, activations, strategy, batch, itemsizes, state, 0 if strategy.offload else workspace
        )
        parameters, buckets = state.shard_bytes, 0
        optimizer = MOMENTS * itemsizes.moment * state.shard_bytes // FP32_BYTES
    else:
        whole = sum(segment.parameters for segment in segments)
        parts = ranks if strategy.dense == "zero1" else 1
        computed = itemsizes.computed
        parameters = (FP32_BYTES + (computed if computed != FP32_BYTES else 0)) * whole
        optimizer = MOMENTS * itemsizes.moment * -(-whole // parts)
        buckets = computed * whole if ranks > 1 else 0
        workspace = _update_workspace(itemsizes, -(-whole // parts), device)
        moments = _replicated(
            segments, activations, strategy, batch, itemsizes, bucket_bytes if buckets else 0, workspace
        )
    peak = max(moments, key=_total)
    offloaded = parameters + optimizer + parameters + workspace if strategy.offload else 0
    return DensePeak(
        parameters=buffers + (0 if strategy.offload else parameters),
        optimizer_state=0 if strategy.offload else optimizer,
        buckets=buckets,
        batch=batch.embeddings + batch.other,
        moment=peak,
        by_segment=activations.by_segment(segments, peak),
        host=offloaded,
    )


def _update_workspace(itemsizes: Itemsizes, numbers: int, device: str) -> int:
    """What the update of so many numbers in a row holds for a moment (`trials.optim.bf16_adamw`)."""
    return 0 if itemsizes.moment == FP32_BYTES else WORKSPACE_BYTES * min(CHUNKS[device], numbers)


def _cast_bytes(itemsizes: Itemsizes, whole: int, bucket_bytes: int) -> int:
    """Beside DDP's buckets, where gradients are sent in another precision (`trials.distributed.comm_hooks`).

    One bucket, while it is cast in place; all of them, where that has no room for larger numbers: none need have
    been reduced when backward ends.
    """
    computed, reduced, _ = itemsizes
    if reduced == computed or not bucket_bytes:
        return 0
    return reduced * (whole if reduced > computed else min(whole, bucket_bytes)) // computed


def _replicated(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    bucket_bytes: int,
    workspace: int,
) -> Iterator[LiveMemory]:
    """dp and zero1. One rank has no buckets (of 0 bytes): gradients appear as backward goes on."""
    itemsize = itemsizes.computed
    several, in_buckets = strategy.micro_batches > 1, bucket_bytes > 0
    beside = batch.embeddings if several else 0
    whole = itemsize * sum(segment.parameters for segment in segments)
    cast = _cast_bytes(itemsizes, whole, bucket_bytes)
    done = whole if several and not in_buckets else 0
    ready = 0
    for index, segment in enumerate(segments):
        yield LiveMemory(
            f"forward of {segment.name}", index, activations.forward[index] + beside, gradients=done
        )
    for index in reversed(range(len(segments))):
        own = 0 if in_buckets or several else activations.backward_gradients[index]
        ready += itemsize * segments[index].parameters
        yield LiveMemory(
            f"backward of {segments[index].name}",
            index,
            activations.backward[index] + beside,
            gradients=done + own,
            buffers=cast if bucket_bytes and ready >= bucket_bytes else 0,
        )
        if not in_buckets and not several:
            done += itemsize * segments[index].parameters
    embeddings = batch.embeddings if several else batch.micro_embeddings
    yield LiveMemory("all-reduce", 0, embeddings, gradients=done, buffers=cast)
    flat, own = FP32_BYTES * whole // itemsize, 0 if in_buckets else whole
    yield LiveMemory("optimizer step", 0, 0, gradients=flat + own)
    yield LiveMemory("optimizer step", 0, 0, gradients=flat, buffers=workspace)


class _Sharded(NamedTuple):
    """Of each segment, in bytes; the first and the last together are the root."""

    gathered: list[int]
    """Parameters as gathered."""
    whole: list[int]
    """Gradients as autograd makes them."""
    shards: list[int]
    """fp32."""
    low: list[int]
    """A shard in compute precision, on its way."""
    reduced: list[int]
    """Padded gradients as they are sent."""
    reduced_low: list[int]
    """A shard of them; 0 in fp32, where it becomes the gradient itself."""
    numbers: list[int]
    """Of the longest shard of one parameter."""
    shard_bytes: int
    """fp32, of all."""
    ranks: int
    """That share a unit."""


def _fully_sharded_state(segments: Sequence[Segment], itemsizes: Itemsizes, ranks: int) -> _Sharded:
    units = [unit(segment.shapes, ranks) for segment in segments]
    shards = [FP32_BYTES * each.shard for each in units]
    itemsize, reduced, _ = itemsizes
    low = 0 if reduced == FP32_BYTES else reduced
    return _Sharded(
        gathered=[itemsize * each.padded for each in units],
        whole=[itemsize * each.whole for each in units],
        shards=shards,
        low=[itemsize * each.shard for each in units],
        reduced=[reduced * each.padded for each in units],
        reduced_low=[low * each.shard for each in units],
        numbers=[-(-rows // ranks) * width for segment in segments for rows, width in segment.shapes],
        shard_bytes=sum(shards),
        ranks=ranks,
    )


class _Walk(NamedTuple):
    """What the passes of zero2, fsdp and hsdp through the segments go by; sizes in bytes."""

    segments: Sequence[Segment]
    activations: Activations
    state: _Sharded
    dense: str
    itemsizes: Itemsizes
    several: bool
    """Micro-batches."""
    on_device: int
    """0 where shards and their gradients live in the host's memory, else 1."""
    batch: Batch

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
        """Embeddings of the micro-batches that are not at work."""
        return self.batch.embeddings if self.several else 0

    @property
    def done(self) -> int:
        """Gradients of the micro-batches before."""
        return self.on_device * self.state.shard_bytes if self.several else 0


def _fully_sharded(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    state: _Sharded,
    workspace: int,
) -> Iterator[LiveMemory]:
    """zero2, fsdp and hsdp, unit by unit: the layers, and the root (features and head)."""
    on_device, several = 0 if strategy.offload else 1, strategy.micro_batches > 1
    walk = _Walk(segments, activations, state, strategy.dense, itemsizes, several, on_device, batch)
    yield from _sharded_forward(walk)
    yield from _sharded_backward(walk)
    yield LiveMemory("optimizer step", 0, 0, on_device * state.shard_bytes, buffers=workspace)


def _sharded_forward(walk: _Walk) -> Iterator[LiveMemory]:
    gathered, arriving, root = walk.state.gathered, walk.arriving, walk.root
    flattened = walk.itemsizes.computed != FP32_BYTES and walk.state.ranks > 1

    def moment(index: int, unsharded: int, buffers: int, what: str = "forward of") -> LiveMemory:
        own = walk.activations.forward if what == "forward of" else walk.activations.after_backward
        at, running = f"{what} {walk.segments[index].name}", own[index] + walk.beside
        return LiveMemory(at, index, running, walk.done, unsharded, buffers)

    kept = 0  # gathered parameters of the layers so far (zero2)
    previous = 0 if walk.state.ranks == 1 else root
    yield moment(0, root, previous)
    for index in range(1, walk.last):
        flat = walk.state.low[index] if flattened else 0
        yield moment(index, root + kept, previous + arriving[index] + flat, "all-gather of")
        if (
            walk.dense == "zero2"
        ):  # what arrived before is still there while parameters are copied to their places
            copied = root + kept + gathered[index]
            yield moment(index, copied, previous + arriving[index], "all-gather of")
        yield moment(index, root + kept + gathered[index], arriving[index])
        previous = arriving[index]
        kept += gathered[index] if walk.dense == "zero2" else 0
    yield moment(walk.last, root + kept, previous)


def _sharded_backward(walk: _Walk) -> Iterator[LiveMemory]:
    state, zero2, done = walk.state, walk.dense == "zero2", walk.done
    root, arriving = walk.root, walk.arriving
    unsharded = root + (sum(state.gathered[1 : walk.last]) if zero2 else 0)
    reducing = loose = 0
    held = 0  # hsdp keeps what every unit's all-reduce puts out until the end of backward
    for index in reversed(range(len(walk.segments))):
        name, layer = walk.segments[index].name, 0 < index < walk.last
        if layer and not zero2:
            unsharded = root + state.gathered[index]
        ahead = 0 if zero2 or index <= 1 else arriving[index - 1]
        running = walk.activations.backward[index] + walk.beside
        gradients = done + loose + walk.activations.backward_gradients[index]
        yield LiveMemory(f"backward of {name}", index, running, gradients, unsharded, ahead + reducing + held)
        if not layer:
            loose += state.whole[index]  # the root's gradients wait for its features'
            continue
        unsharded -= state.gathered[index]
        reducing, low = state.reduced[index], state.reduced_low[index]
        for shard, buffers in ((state.whole[index], 0), (state.shards[index], low)):
            at, after = f"reduce-scatter of {name}", walk.activations.after_backward[index] + walk.beside
            yield LiveMemory(
                at, index, after, done + loose + shard, unsharded, ahead + reducing + held + buffers
            )
        if not walk.several:
            done += walk.on_device * state.shards[index]
        if walk.dense == "hsdp":  # in fp32 it is the gradient itself, unless it is added to an earlier one
            held += low or (state.shards[index] if walk.several else 0)
    embeddings = walk.batch.embeddings if walk.several else walk.batch.micro_embeddings
    sent = state.reduced[0] + state.reduced[walk.last]
    yield LiveMemory("reduce-scatter of the root", 0, embeddings, done + loose, 0, sent + held)
