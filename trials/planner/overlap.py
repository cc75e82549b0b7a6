"""The overlap of compute and links: the passes of one micro-batch played out on a clock for each of them.

Compute goes through the segments forward and back; collectives wait for what they need, for the collective
before them on their link, and compute waits for what it needs of them. As torch does it:
DistributedDataParallel reduces gradients bucket by bucket behind backward; `fully_shard` gathers one layer
ahead (in forward once the layer before has its weights, in backward likewise), and before it copies a layer's
gradients out it waits for the reduce-scatter of the layer before. HSDP's all-reduce across hosts has the
network to itself while gathers and reduce-scatters use NVLink.

Left out: what a collective takes from the compute beside it (`step_time` adds that), the host's own pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trials.cluster.cluster import Cluster
from trials.planner.collectives import (
    LAUNCH_SECONDS,
    LAYER_MEMORY_SHARE,
    MATMUL_SHARE,
    OPERATION_SECONDS,
    AlphaBeta,
    collectives,
)
from trials.planner.segments import Segment
from trials.records.job import TrainingConfig
from trials.records.strategy import RECOMPUTED, Strategy


class UnitSeconds(NamedTuple):
    """Seconds for what `fully_shard` gathers and reduces at once: a layer, or the root unit (everything but
    the layers)."""

    fetch: float
    """Copying the unit's shard from host to device; 0 but for offload."""
    gather: float
    copy_out: float
    """Copying gathered weights to their places on the device."""
    copy_in: float
    """Copying gradients on the device into one row for the reduce-scatter."""
    scatter: float
    reduce: float
    """All-reduce of the unit's shard across hosts; 0 but for HSDP."""
    give_back: float
    """Copying the shard of the unit's gradients from device to host; 0 but for offload."""


class PassSeconds(NamedTuple):
    """Seconds of compute of a micro-batch, by segment in forward's order."""

    before: tuple[float, float]
    """Forward and backward of what stands before the layers (features)."""
    layers: Sequence[tuple[float, float]]
    """Forward, and backward with recomputation, of each layer."""
    after: tuple[float, float]
    """Forward and backward of what stands above the layers (head)."""


def reduced_in_buckets(
    backward: Sequence[float],
    gradient_bytes: Sequence[float],
    bucket_bytes: int,
    all_reduce: Callable[[float], float],
) -> tuple[float, float]:
    """Times backward with DistributedDataParallel's all-reduces: seconds until both have ended, seconds of
    all-reduce.

    Args:
        backward: seconds by segment, in backward's order.
        gradient_bytes: gradients of each segment's parameters; they come evenly over its backward.
        bucket_bytes: bytes of gradients that are reduced at a time.
        all_reduce: a function from bytes to the seconds of their all-reduce.
    """
    a_bucket = all_reduce(bucket_bytes)
    compute = link = spent = 0.0
    waiting = 0.0  # bytes in a bucket that is not full yet
    for seconds, size in zip(backward, gradient_bytes, strict=True):
        full, unfilled = divmod(waiting + size, bucket_bytes)
        if full:
            first_full = compute + seconds * (bucket_bytes - waiting) / size
            last_full = compute + seconds * (size - unfilled) / size
            link = max(max(link, first_full) + full * a_bucket, max(link, last_full) + a_bucket)
            spent += full * a_bucket
        compute, waiting = compute + seconds, unfilled
    if waiting:
        last_bucket = all_reduce(waiting)
        link, spent = max(link, compute) + last_bucket, spent + last_bucket
    return max(compute, link), spent


class Reduction(NamedTuple):
    """Seconds for what ZeRO's stages 1 and 2, and ZeRO-Offload, reduce at a time."""

    copy_in: float
    """Putting gradients together on the device, in the precision in which they are sent."""
    scatter: float
    leave: float = 0.0
    """Copying the own part from device to host; 0 but for ZeRO-Offload."""


def scattered(backward: Sequence[tuple[float, Reduction | None]]) -> float:
    """Returns the seconds until backward and its reduce-scatters have ended (ZeRO's stages 1 and 2), and the
    copies to the host (ZeRO-Offload).

    Args:
        backward: seconds of each segment in backward's order, and the bucket that is complete with it, if any. A
            bucket goes once the one before has been reduced, for which compute waits.
    """
    compute = link = 0.0
    for seconds, bucket in backward:
        compute += seconds
        if bucket is not None:
            compute = max(compute, link) + bucket.copy_in
            link = compute + bucket.scatter + bucket.leave
    return max(compute, link)


def fully_sharded(
    passes: PassSeconds, root: UnitSeconds, layers: Sequence[UnitSeconds], *, keep: bool
) -> float:
    """Returns the seconds until compute and all links have ended; `keep`: weights stay gathered until
    backward (shard_grad_op)."""
    link = root.fetch + root.gather
    have_weights = link + root.copy_out
    compute = have_weights + passes.before[0]
    for unit, (forward, _) in zip(layers, passes.layers, strict=True):
        link = max(link, have_weights) + unit.fetch + unit.gather
        have_weights = max(compute, link) + unit.copy_out
        compute = have_weights + forward
    compute += passes.after[0]
    # backward: a layer's weights are asked for when the one above has its own, before that one's reduce-scatter;
    # the root's weights are still gathered
    after = scattered = 0.0
    gathers = [] if keep else [unit.fetch + unit.gather for unit in layers]
    gathered = link = max(link, compute) + gathers.pop() if gathers else 0.0
    compute += passes.after[1]
    for unit, (_, backward) in zip(reversed(layers), reversed(passes.layers), strict=True):
        if not keep:
            compute = max(compute, gathered) + unit.copy_out
            if gathers:
                gathered = link = max(link, compute) + gathers.pop()
        compute = max(compute + backward, scattered) + unit.copy_in
        link, after = _reduce(unit, compute, link, after)
        scattered = link
    compute = max(compute + passes.before[1], scattered) + root.copy_in
    return max(compute, *_reduce(root, compute, link, after))


def _reduce(unit: UnitSeconds, compute: float, link: float, after: float) -> tuple[float, float]:
    """Returns when a unit's gradients are scattered, and when what comes after that on other links has
    ended."""
    link = max(link, compute) + unit.scatter
    seconds = unit.reduce + unit.give_back
    return link, (max(after, link) + seconds if seconds else after)


# The seconds that ranks which split modules send each other, while they compute nothing.
#
# Sums of outputs and of gradients, and gathered outputs, as tapes have them (`dhen.tape.SplitTraffic`), priced by
# the links of a tensor group: those in a host if the host has all its ranks, else the network too. What is
# recomputed is sent again. Once a step the group gathers what its ranks looked up.


class Seconds(NamedTuple):
    """Seconds of a kind of collective in one micro-batch, by segment: features, layers, head."""

    forward: list[float]
    backward: list[float]

    def of(self, strategy: Strategy) -> float:
        """Returns the seconds in a step."""
        again = self.forward[1:-1][RECOMPUTED[strategy.checkpointing]]
        return strategy.micro_batches * (sum(self.forward) + sum(self.backward) + sum(again))


class SentBySplit(NamedTuple):
    """What a tensor group sends."""

    all_reduce: Seconds
    all_gather: Seconds
    inputs: AlphaBeta
    """The cost of gathering inputs."""
    input_bytes: int
    """Bytes of a micro-batch's inputs, which are gathered for all micro-batches at once."""


def sent_by_split(segments: Sequence[Segment], cluster: Cluster, degree: int, examples: int) -> SentBySplit:
    """Returns what is sent for micro-batches of so many examples."""
    hosts = max(1, degree // cluster.gpus_per_host)
    group = collectives(cluster, hosts, degree // hosts)
    return SentBySplit(
        _seconds(segments, "all_reduce", group.all_reduce, examples),
        _seconds(segments, "all_gather", group.all_gather.__call__, examples),
        group.all_gather,
        segments[0].footprint.input,
    )


def split_seconds(sent: SentBySplit, strategy: Strategy) -> tuple[float, float]:
    """Returns the seconds of all-reduces and of all-gathers in a step."""
    inputs = sent.inputs(strategy.micro_batches * sent.input_bytes)
    return sent.all_reduce.of(strategy), sent.all_gather.of(strategy) + inputs


def _seconds(segments: Sequence[Segment], kind: str, run: Callable[[float], float], examples: int) -> Seconds:
    found = Seconds([0.0] * len(segments), [0.0] * len(segments))
    for place, segment in enumerate(segments):
        for one in segment.sent:
            if one.kind == kind:
                seconds = found.forward if one.forward else found.backward
                seconds[place] += run(one.size.each * examples + one.size.fixed)
    return found


# The seconds of a step's compute, by a roofline.
#
# A CPU takes the longer of a segment's FLOPs at the reachable peak and of its traffic at the reachable memory
# bandwidth (Williams et al. 2009), and what each operation costs however small. A GPU takes the sum of both, as
# it runs kernels one after another, of which some are bound by the one and some by the other; or what its host
# takes to start them, if that is longer. Backward counts twice: a product has two of the same size (gradients
# of weights and of inputs), and other operations read the output's gradient and what was saved, and write the
# input's.
#
# Left out: shapes (thin products reach less than `MATMUL_SHARE`), TF32 (torch's default for fp32 is without),
# layers that are compiled (`trials.training.compile_layers`). On a CPU the ranks of a host share its cores and
# memory.

BACKWARD_PASSES = 2
"""Number of forward passes that backward costs as much as."""
FREQUENCY_DECAY_PASSES = 3
"""Passes of `training.frequency_decay` over what was looked up: embeddings and their gradients are read, gradients
are written."""


def segment_passes(
    segment: Segment, cluster: Cluster, training: TrainingConfig, examples: int, bandwidth: float
) -> tuple[float, float]:
    """Returns the seconds of a segment's forward and backward passes."""
    ranks = cluster.gpus_per_host if cluster.device == "cpu" else 1
    peak = getattr(cluster.peak_flops, training.precision) / ranks * MATMUL_SHARE
    reached = bandwidth * (LAYER_MEMORY_SHARE if cluster.device == "cpu" else 1.0)
    products, moved = segment.flops * examples / peak, segment.footprint.traffic / reached
    forward = from_sizes(
        max(products, moved) if cluster.device == "cpu" else products + moved, segment, cluster
    )
    return forward, BACKWARD_PASSES * forward


def from_sizes(seconds: float, segment: Segment, cluster: Cluster) -> float:
    """Returns the seconds of a segment's forward pass in which computing takes so many: on a CPU operations come
    on top, on a GPU they are started meanwhile."""
    if cluster.device == "cpu":
        return seconds + start_seconds(segment, cluster)
    return max(seconds, segment.operations * LAUNCH_SECONDS)


def start_seconds(segment: Segment, cluster: Cluster) -> float:
    """Returns the seconds that the operations of a segment's forward pass add to what they compute on a CPU."""
    return segment.operations * OPERATION_SECONDS if cluster.device == "cpu" else 0.0
