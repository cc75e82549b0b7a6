"""Memory of ZeRO-Offload, moment by moment: what `trials.distributed.zero_offload` holds on the device and the
host.

The device has weights in c, padded to equal parts, the gradients of the segment that is in backward, and one
bucket on its way. The host has, of the own parts, fp32 masters, moments, weights in c that go back, and a place
for gradients as they arrive and in fp32; with delay two such places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from dhen.memory.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.planner.live_memory import Activations, Batch, Itemsizes, LiveMemory
from trials.planner.segments import Segment
from trials.planner.zero.memory import TABLES_UPDATE, ZeroState
from trials.strategy import Strategy


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
