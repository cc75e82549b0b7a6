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


def zero_moments(
    segments: Sequence[Segment],
    activations: Activations,
    strategy: Strategy,
    batch: Batch,
    itemsizes: Itemsizes,
    state: ZeroState,
    workspace: int,
) -> Iterator[LiveMemory]:
    """Yields the moments of the last micro-batch, in which most is held, and of the update."""
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
        if index == 0:
            made += batch.micro_embeddings  # their gradients come before those of the numeric inputs' weights
        gradients = min(gradients + way.gradient, all_gradients)
        padded = reduced * state.ranks * ends[index]
        way = _OnItsWay(
            sent=0 if stays and reduced == computed else padded,
            part=reduced * ends[index],
            gradient=FP32_BYTES * ends[index],
        )
        whole = 0 if stays else computed * segments[index].parameters
        yield LiveMemory(at, index, made, gradients + whole, buffers=way.sent)
        yield LiveMemory(at, index, made, gradients, buffers=way.sent + way.part)
    embeddings = batch.embeddings if several else batch.micro_embeddings
    yield LiveMemory("reduce-scatter of features", 0, embeddings, gradients, buffers=way.sent + way.part)
    arrived = 0 if reduced == FP32_BYTES else way.part  # what becomes the last bucket's gradient
    yield LiveMemory("optimizer step", 0, 0, all_gradients, buffers=max(arrived, workspace))
