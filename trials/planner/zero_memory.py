"""Memory of ZeRO's stages 1 and 2, moment by moment: what `trials.training.distributed.zero` holds.

Weights lie in c on every rank, in buckets that are padded to equal parts. Of its own parts a rank has the
moments, fp32 masters where c is not fp32, and from a bucket's reduction to the update fp32 gradients. Stage 1
has gradients in c of all weights all the time. Stage 2 has those of the segment that is in backward, and one
bucket on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from dhen.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.planner.segments import ITEMSIZES, Segment
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy

# What is alive at a moment of a step, and the sizes that it is made of: shared by all engines' accounts.


class Itemsizes(NamedTuple):
    """Bytes per number of the dense part, by what the number is."""

    computed: int
    """Bytes of weights as the model computes with them, of gradients and of activations: c."""
    reduced: int
    """Bytes of gradients as they are sent between ranks: r."""
    moment: int
    """Bytes of a moment in the optimizer's state."""

    @classmethod
    def of(cls, training: TrainingConfig) -> Itemsizes:
        """Returns the sizes for training settings whose precision is resolved."""
        assert training.precision != "auto"
        reduced = training.reduction_precision(training.precision)
        return cls(*(ITEMSIZES[name] for name in (training.precision, reduced, training.optimizer_precision)))


class Batch(NamedTuple):
    """A rank's input, in bytes."""

    embeddings: int
    """Embeddings that were looked up, in fp32; their gradient takes as many bytes."""
    micro_embeddings: int
    """Embeddings of one micro-batch, in fp32."""
    other: int
    """Numeric inputs and labels."""


class LiveMemory(NamedTuple):
    """What is alive at one moment beside the resident state."""

    at: str
    segment: int
    """Index of the running segment; the segments before it keep their activations."""
    activations: int
    gradients: int = 0
    unsharded: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """The bytes of all items together."""
        return total(self)


def total(moment: LiveMemory) -> int:
    """Returns the bytes of all items together."""
    return moment[2] + moment[3] + moment[4] + moment[5]


class Activations:
    """What segments hold at each moment, for one micro-batch size and one setting of checkpointing."""

    def __init__(self, segments: Sequence[Segment], recomputed: Sequence[bool]) -> None:
        footprints = [segment.footprint for segment in segments]
        # the first segment's input is the batch
        inputs = [0, *(footprint.input for footprint in footprints[1:])]
        by_segment = list(zip(footprints, inputs, recomputed, strict=True))
        self.kept = [size if again else footprint.kept for footprint, size, again in by_segment]
        self.before = [0, *accumulate(self.kept)][:-1]
        """Bytes that the segments before each segment keep."""
        self.forward, self.backward, self.backward_gradients, self.after_backward = [], [], [], []
        self.gradients_made: list[int] = []
        """Bytes when a segment's last parameter gradient has been made, beside these gradients."""
        for base, (footprint, size, again) in zip(self.before, by_segment, strict=True):
            peak, with_gradients = footprint.backward_peak, footprint.backward_peak_with_gradients
            if again:
                recomputation = size + footprint.repeated_peak
                peak = max(recomputation, footprint.recomputed_peak)
                with_gradients = max(recomputation, footprint.recomputed_peak_with_gradients)
            self.forward.append(
                base + size + (footprint.discarding_peak if again else footprint.forward_peak)
            )
            made = footprint.recomputed_gradients_made if again else footprint.gradients_made
            self.gradients_made.append(base + max(made, size))
            self.backward.append(base + peak)
            self.backward_gradients.append(with_gradients - peak)
            self.after_backward.append(base + size)  # the gradient of its input

    def by_segment(self, segments: Sequence[Segment], moment: LiveMemory) -> tuple[tuple[str, int], ...]:
        """Returns a moment's activations by the segment that they belong to."""
        running = moment.segment
        earlier = [(segments[i].name, self.kept[i]) for i in range(running)]
        return (*earlier, (segments[running].name, moment.activations - sum(size for _, size in earlier)))


# The buckets of ZeRO's stages 1 and 2: which units of a model lie in one tensor, to be reduced at a time.


def zero_buckets(unit_bytes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Joins neighbouring units from the last backwards, as backward comes to them, until a bucket is full.

    Args:
        unit_bytes: bytes of gradients of each unit in forward's order: features, layers, head.
        bucket_bytes: bytes from which on a bucket is full; with 0 every unit that has parameters is a bucket.

    Returns:
        The places of each bucket's units, first bucket first; every unit with parameters is in one.
    """
    buckets: list[range] = []
    stop, size = len(unit_bytes), 0
    for place in reversed(range(len(unit_bytes))):
        size += unit_bytes[place]
        if size and (size >= bucket_bytes or place == 0):
            buckets.append(range(place, stop))
            stop, size = place, 0
    return buckets[::-1]


TABLES_UPDATE = "update of the tables"
"""Name of the moment between backward and the dense part's update."""


class ZeroState(NamedTuple):
    """Sizes of a rank's buckets."""

    buckets: list[range]
    """Places of each bucket's segments."""
    parts: list[int]
    """Numbers of the own part of each bucket, padding included."""
    ranks: int
    weights: int
    """Bytes of all buckets as the model computes with them."""
    masters: int
    """Bytes of the own parts' fp32 weights on the device; 0 if the model computes with these, or the host has
    them."""

    @property
    def owned(self) -> int:
        """Numbers that a rank has the state of."""
        return sum(self.parts)


def zero_state(
    segments: Sequence[Segment], strategy: Strategy, itemsizes: Itemsizes, ranks: int, bucket_bytes: int
) -> ZeroState:
    """Returns the buckets of stage 1 (of `bucket_bytes` at least), or of stage 2 and ZeRO-Offload (one for each
    segment)."""
    computed = itemsizes.computed
    sizes = [computed * segment.parameters for segment in segments]
    buckets = zero_buckets(sizes, bucket_bytes if strategy.dense == "zero1" else 0)
    parts = [-(-sum(segments[place].parameters for place in bucket) // ranks) for bucket in buckets]
    no_masters = computed == FP32_BYTES or strategy.dense == "zero_offload"
    masters = 0 if no_masters else FP32_BYTES * sum(parts)
    return ZeroState(buckets, parts, ranks, computed * ranks * sum(parts), masters)


class _OnItsWay(NamedTuple):
    """The bucket that is being reduced, in bytes."""

    sent: int = 0
    """What is sent, apart from gradients that stay."""
    part: int = 0
    """The own part as it arrives."""
    gradient: int = 0
    """The fp32 gradient that it becomes, or is."""
    copy: int = 0
    """What is sent once more, as gloo reduces it."""

    def waited_for(self, copies: bool) -> int:
        """Returns what is held while the bucket is waited for, with gloo's copy or without."""
        return self.sent + self.part + (self.copy if copies else 0)


def zero_moments(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    state: ZeroState,
    workspace: int,
    *,
    copies: bool,
) -> Iterator[LiveMemory]:
    """Yields the moments of the last micro-batch, in which most is held, and of the update.

    With `copies` a bucket that is reduced is held once more, by gloo, when it is waited for.
    """
    computed, reduced, _ = itemsizes
    several, stays = strategy.micro_batches > 1, strategy.dense == "zero1"
    beside = batch.embeddings if several else 0
    all_gradients = FP32_BYTES * state.owned
    gradients = all_gradients if several and not stays else 0
    for index, segment in enumerate(segments):
        yield LiveMemory(f"forward of {segment.name}", index, activations.forward[index] + beside, gradients)
    ends = {bucket.start: part for bucket, part in zip(state.buckets, state.parts, strict=True)}
    way = _OnItsWay()
    for index in reversed(range(len(segments))):
        name, own = segments[index].name, 0 if stays else activations.backward_gradients[index]
        at, running = f"backward of {name}", activations.backward[index] + beside
        yield LiveMemory(at, index, running, gradients + own, buffers=way.sent + way.part)
        if index not in ends:
            continue
        at, made = f"reduce-scatter of {name}", activations.gradients_made[index] + beside
        if index == 0:  # embeddings' gradients come first, the output's is no longer needed
            made = max(batch.micro_embeddings + beside, made - segments[0].footprint.output)
        whole = 0 if stays else computed * segments[index].parameters
        yield LiveMemory(at, index, made, gradients + whole, buffers=way.waited_for(copies))
        gradients = min(gradients + way.gradient, all_gradients)
        padded = reduced * state.ranks * ends[index]
        way = _OnItsWay(
            sent=0 if stays and reduced == computed else padded,
            part=reduced * ends[index],
            gradient=FP32_BYTES * ends[index],
            copy=padded,
        )
        yield LiveMemory(at, index, made, gradients + whole, buffers=way.sent)
        yield LiveMemory(at, index, made, gradients, buffers=way.sent + way.part)
    embeddings = batch.embeddings if several else batch.micro_embeddings
    yield LiveMemory("reduce-scatter of features", 0, embeddings, gradients, buffers=way.sent + way.part)
    last_gradient = 0 if several and not stays else way.gradient
    yield LiveMemory("optimizer step", 0, 0, all_gradients - last_gradient, buffers=way.waited_for(copies))
    arrived = 0 if reduced == FP32_BYTES else way.part  # what becomes the last bucket's gradient
    yield LiveMemory("optimizer step", 0, 0, all_gradients, buffers=max(arrived, workspace))


def zero_left(strategy: Strategy, itemsizes: Itemsizes, state: ZeroState) -> LiveMemory:
    """Returns what is held while tables are updated: all gradients but those of the first bucket, which is still
    on its way."""
    several, stays = strategy.micro_batches > 1, strategy.dense == "zero1"
    part, reduced = state.parts[0] if state.parts else 0, itemsizes.reduced
    sent = 0 if stays and reduced == itemsizes.computed else reduced * state.ranks * part
    missing = 0 if several and not stays else FP32_BYTES * part
    gradients = FP32_BYTES * state.owned - missing
    return LiveMemory(TABLES_UPDATE, 0, 0, gradients, buffers=sent + reduced * part)


def zero_wrapping_bytes(segments: Sequence[Segment], itemsizes: Itemsizes, state: ZeroState) -> int:
    """Returns the most that is held while buckets take the weights over one after another: the model's fp32
    weights that are left, and a bucket in fp32 beside what it becomes."""
    computed, casts = itemsizes.computed, itemsizes.computed != FP32_BYTES
    left, done, most = FP32_BYTES * sum(segment.parameters for segment in segments), 0, 0
    for bucket, part in zip(state.buckets, state.parts, strict=True):
        whole = FP32_BYTES * state.ranks * part
        becomes = computed * state.ranks * part + FP32_BYTES * part if casts else 0
        most = max(most, left + done + whole + becomes)
        left -= FP32_BYTES * sum(segments[place].parameters for place in bucket)
        done += becomes or whole
    return most


# Memory of ZeRO-Offload, moment by moment: what `trials.training.distributed.zero_offload` holds on the device
# and the host.
#
# The device has weights in c, padded to equal parts, the gradients of the segment that is in backward, and one
# bucket on its way. The host has, of the own parts, fp32 masters, moments, weights in c that go back, and a
# place for gradients as they arrive and in fp32; with delay two such places.


def host_bytes(state: ZeroState, itemsizes: Itemsizes, workspace: int, *, delayed: bool) -> int:
    """Returns what a rank holds in the host's memory; `workspace` is the update's."""
    places = 2 if delayed else 1
    gradient = itemsizes.reduced + FP32_BYTES
    number = FP32_BYTES + len(MOMENTS) * itemsizes.moment + itemsizes.computed + places * gradient
    return number * state.owned + workspace


def zero_offload_moments(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    state: ZeroState,
    device: Literal["cpu", "cuda"],
    *,
    copies: bool,
) -> Iterator[LiveMemory]:
    """Yields the moments of a micro-batch on the device, which are alike in all of them, and of the update.

    With `copies` a bucket that is reduced is held once more, by gloo, when it is waited for.
    """
    computed, reduced, _ = itemsizes
    beside = batch.embeddings if strategy.micro_batches > 1 else 0
    several_ranks = state.ranks > 1
    for index, segment in enumerate(segments):
        yield LiveMemory(f"forward of {segment.name}", index, activations.forward[index] + beside)
    ends = {bucket.start: part for bucket, part in zip(state.buckets, state.parts, strict=True)}
    on_its_way = copied = copy = 0
    for index in reversed(range(len(segments))):
        name, own = segments[index].name, activations.backward_gradients[index]
        running = activations.backward[index] + beside
        yield LiveMemory(f"backward of {name}", index, running, own, buffers=on_its_way)
        if index not in ends:
            continue
        at, made = f"reduce-scatter of {name}", activations.gradients_made[index] + beside
        if index == 0:  # embeddings' gradients come first, the output's is no longer needed
            made = max(batch.micro_embeddings + beside, made - segments[0].footprint.output)
        whole = computed * segments[index].parameters
        yield LiveMemory(at, index, made, whole, buffers=on_its_way + copy)
        sent, part = reduced * state.ranks * ends[index], reduced * ends[index]
        yield LiveMemory(at, index, made, whole, buffers=sent + copied)
        # an accelerator frees a part when the next one leaves, which waits for the copy; a CPU copies at once
        left = part if device == "cuda" else 0
        on_its_way = sent + part + copied if several_ranks else left
        copied, copy = left, sent if copies else 0
        yield LiveMemory(at, index, made, buffers=on_its_way)
    embeddings = batch.embeddings if strategy.micro_batches > 1 else batch.micro_embeddings
    yield LiveMemory("copy of the last gradients to the host", 0, embeddings, buffers=on_its_way)
    yield LiveMemory("copy of the last gradients to the host", 0, 0, buffers=on_its_way + copy)


def offload_left(itemsizes: Itemsizes, state: ZeroState, device: Literal["cpu", "cuda"]) -> LiveMemory:
    """Returns what is held while tables are updated: the first bucket, which is still on its way."""
    part = itemsizes.reduced * (state.parts[0] if state.parts else 0)
    if state.ranks == 1:
        return LiveMemory(TABLES_UPDATE, 0, 0, buffers=part if device == "cuda" else 0)
    return LiveMemory(TABLES_UPDATE, 0, 0, buffers=state.ranks * part + part)
