"""Memory of ZeRO's stages 1 and 2, moment by moment: what `trials.distributed.zero` holds.

Weights lie in c on every rank, in buckets that are padded to equal parts. Of its own parts a rank has the moments,
fp32 masters where c is not fp32, and from a bucket's reduction to the update fp32 gradients. Stage 1 has gradients
in c of all weights all the time. Stage 2 has those of the segment that is in backward, and one bucket on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dhen.memory.tape import FP32_BYTES
from trials.planner.live_memory import Activations, Batch, Itemsizes, LiveMemory
from trials.planner.segments import Segment
from trials.planner.zero.buckets import zero_buckets
from trials.strategy import Strategy

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
    """Bytes of the own parts' fp32 weights on the device; 0 where the model computes with these, or the host has
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
