"""Memory of ZeRO's stages 1 and 2, and of ZeRO-Offload, moment by moment: what `trials.training.distributed.zero`
and `zero_offload` hold.

Weights lie in c on every rank, in buckets that are padded to equal parts. Of its own parts a rank has the
moments, fp32 masters if c is not fp32, and from a bucket's reduction to the update fp32 gradients. Stage 1
has gradients in c of all weights all the time. Stage 2 has those of the segment that is in backward, and one
bucket on its way.

With ZeRO-Offload the device has weights in c, the gradients of the segment that is in backward, and one bucket on
its way. The host has, of the own parts, fp32 masters, moments, weights in c that go back, and a place for
gradients as they arrive and in fp32; with delay two such places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from dhen.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.optim.one_bit_adam import LowRankSizes
from trials.planner.collectives import BUCKET_BYTES
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


class RankInput(NamedTuple):
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


class DenseRank(NamedTuple):
    """A rank's dense part before it is priced: what memory depends on."""

    segments: Sequence[Segment]
    """The model's segments at the micro-batch's size."""
    activations: Activations
    """What these segments hold, with the strategy's checkpointing."""
    strategy: Strategy
    batch: RankInput
    itemsizes: Itemsizes
    hosts: int
    gpus_per_host: int
    """Ranks per host; with `hosts` those that hold the same parts of the model."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of the device; it decides how many numbers the update takes at once, and whether gloo or NCCL sends."""
    bucket_bytes: int = BUCKET_BYTES
    """Bytes of gradients that DDP reduces at a time."""
    delayed: bool = False
    """Whether updates go on while the next step runs (zero_offload)."""
    one_bit: bool = False
    """Whether the optimizer is one-bit Adam (dp and zero1)."""
    low_rank: LowRankSizes | None = None
    """What PowerSGD sends (dp alone); None without it."""

    @property
    def ranks(self) -> int:
        """Ranks that a weight's gradients are averaged over."""
        return self.hosts * self.gpus_per_host

    @property
    def copies(self) -> bool:
        """Whether what is reduced or scattered is held once more, by gloo."""
        return self.device == "cpu" and self.ranks > 1

    @property
    def values(self) -> int:
        """Number of parameters."""
        return sum(segment.parameters for segment in self.segments)

    @property
    def several(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.strategy.micro_batches > 1

    @property
    def beside(self) -> int:
        """Embeddings of all micro-batches, alive beside the running one; 0 with one micro-batch."""
        return self.batch.embeddings if self.several else 0

    @property
    def last_embeddings(self) -> int:
        """Embeddings whose gradients are there when backward has ended."""
        return self.batch.embeddings if self.several else self.batch.micro_embeddings

    def forward(self, gradients: int) -> Iterator[LiveMemory]:
        """Yields the moments of forward if nothing is gathered, beside so many bytes of gradients."""
        for index, segment in enumerate(self.segments):
            running = self.activations.forward[index] + self.beside
            yield LiveMemory(f"forward of {segment.name}", index, running, gradients)


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


def zero_moments(rank: DenseRank, state: ZeroState, workspace: int) -> Iterator[LiveMemory]:
    """Yields the moments of the last micro-batch, in which most is held, and of the update.

    Gradients of ZeRO-Offload go to the host, whose memory the update takes; its micro-batches are all alike.
    """
    segments, activations = rank.segments, rank.activations
    computed, reduced, _ = rank.itemsizes
    stays, offload = rank.strategy.dense == "zero1", rank.strategy.dense == "zero_offload"
    all_gradients = 0 if offload else FP32_BYTES * state.owned
    gradients = all_gradients if rank.several and not stays else 0
    yield from rank.forward(gradients)
    ends = {bucket.start: part for bucket, part in zip(state.buckets, state.parts, strict=True)}
    # of the bucket that is being reduced: what is sent apart from gradients that stay, and the own part as it
    # arrives; what gloo holds of it once more when it is waited for; the fp32 gradient that it becomes, or is
    on_its_way = copy = arriving = gradient = 0
    copied = 0  # the part before, on its way to the host
    for index in reversed(range(len(segments))):
        name, own = segments[index].name, 0 if stays else activations.backward_gradients[index]
        at, running = f"backward of {name}", activations.backward[index] + rank.beside
        yield LiveMemory(at, index, running, gradients + own, buffers=on_its_way)
        if index not in ends:
            continue
        at, made = f"reduce-scatter of {name}", activations.gradients_made[index] + rank.beside
        if index == 0:  # embeddings' gradients come first, the output's is no longer needed
            made = max(rank.batch.micro_embeddings + rank.beside, made - segments[0].footprint.output)
        whole = 0 if stays else computed * segments[index].parameters
        yield LiveMemory(at, index, made, gradients + whole, buffers=on_its_way + copy)
        gradients = min(gradients + gradient, all_gradients)
        padded, arriving = reduced * state.ranks * ends[index], reduced * ends[index]
        sent, gradient = 0 if stays and reduced == computed else padded, FP32_BYTES * ends[index]
        yield LiveMemory(at, index, made, gradients + whole, buffers=sent + copied)
        # an accelerator frees a part when the next one leaves, which waits for the copy; a CPU copies at once
        left = arriving if offload and rank.device == "cuda" else 0
        on_its_way = left if offload and state.ranks == 1 else sent + arriving + copied
        copied, copy = left, padded if rank.copies else 0
        yield LiveMemory(at, index, made, gradients, buffers=on_its_way)
    at = "copy of the last gradients to the host" if offload else "reduce-scatter of features"
    yield LiveMemory(at, 0, rank.last_embeddings, gradients, buffers=on_its_way)
    if offload:
        yield LiveMemory(at, 0, 0, buffers=on_its_way + copy)
        return
    last_gradient = 0 if rank.several and not stays else gradient
    yield LiveMemory("optimizer step", 0, 0, all_gradients - last_gradient, buffers=on_its_way + copy)
    arrived = 0 if reduced == FP32_BYTES else arriving  # what becomes the last bucket's gradient
    yield LiveMemory("optimizer step", 0, 0, all_gradients, buffers=max(arrived, workspace))


def zero_left(rank: DenseRank, state: ZeroState) -> LiveMemory:
    """Returns what is held while tables are updated: all gradients but those of the first bucket, which is still
    on its way, and with ZeRO-Offload nothing else."""
    computed, reduced, _ = rank.itemsizes
    part = state.parts[0] if state.parts else 0
    stays = rank.strategy.dense == "zero1"
    sent = 0 if stays and reduced == computed else reduced * state.ranks * part
    if rank.strategy.dense == "zero_offload":
        if state.ranks == 1:
            sent, part = 0, part if rank.device == "cuda" else 0
        return LiveMemory(TABLES_UPDATE, 0, 0, buffers=sent + reduced * part)
    missing = 0 if rank.several and not stays else FP32_BYTES * part
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


def host_bytes(rank: DenseRank, state: ZeroState, workspace: int) -> int:
    """Returns what a rank holds in the host's memory under ZeRO-Offload; `workspace` is the update's."""
    computed, reduced, moment = rank.itemsizes
    places = 2 if rank.delayed else 1
    return (
        FP32_BYTES + len(MOMENTS) * moment + computed + places * (reduced + FP32_BYTES)
    ) * state.owned + workspace
