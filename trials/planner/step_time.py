"""The duration of a training step: compute, the alpha-beta model for collectives, their overlap.

`compute_time` prices compute, `collectives` communication, `timeline` says what of it hides behind compute, and
compute beside a collective is slowed by `OVERLAP_SLOWDOWN`. `fully_shard` gathers in every micro-batch; it
reduces in every one too, or in the last alone (`no_sync`, and HSDP's all-reduce across hosts), as
DistributedDataParallel does.

What tensor groups send hides behind nothing: the next operation needs it (`split_time`).

Left out: the input pipeline, evaluation. Held against one H100 (docs/benchmarks/accelerator.md), never against
several GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

from trials.cluster.cluster import Cluster
from trials.optim.adamw import CHUNKS
from trials.optim.one_bit_adam import AT_ONCE, ChunkLayout, LowRankSizes, low_rank_of
from trials.planner.collectives import (
    HOST_MEMORY_BANDWIDTH,
    HOST_STEP_SECONDS,
    KERNEL_SECONDS,
    MEMORY_SHARE,
    OVERLAP_SLOWDOWN,
    Collectives,
    collectives,
)
from trials.planner.estimates import StepTime
from trials.planner.memory import unit
from trials.planner.overlap import (
    BACKWARD_PASSES,
    FREQUENCY_DECAY_PASSES,
    PassSeconds,
    Reduction,
    SentBySplit,
    UnitSeconds,
    fully_sharded,
    reduced_in_buckets,
    scattered,
    segment_passes,
    sent_by_split,
    split_seconds,
    start_seconds,
)
from trials.planner.segments import Segment, shapes_of
from trials.planner.table_placement import Placement
from trials.planner.zero_memory import Itemsizes, zero_buckets
from trials.records.job import TrainingConfig
from trials.records.strategy import RECOMPUTED, Strategy, data_ranks, shards

MASTER_BYTES = 4
"""Bytes of a weight as the optimizer holds it."""
UPDATE_MASTERS, UPDATE_MOMENTS = 3, 4
"""AdamW's traffic per parameter: it reads weight, gradient and two moments, and writes all but the
gradient."""
CLIP_BYTES = 3 * MASTER_BYTES
"""Clipping's traffic per parameter: gradients are read for their norm, then read and written."""
UPDATE_KERNELS = 8
"""Kernels for each chunk of numbers whose moments are in bf16 (`trials.optim.adamw`)."""
ONE_BIT_BYTES = {"cpu": 92, "cuda": 152}
"""Traffic per parameter of one-bit Adam's second stage. What is carried takes in gradient and root (16), is
compressed (8 as it is read and written) and takes in the momentum (8); weights decay (8) and are updated (8). On a
GPU the kernels that compress, sum up and decompress a piece read and write memory each (104). On a CPU pieces stay
in a cache; that this costs as much as 44 bytes of traffic is an assumption, unverified."""
ONE_BIT_KERNELS = 24
"""Kernels for each piece of numbers that is compressed, summed up and decompressed
(`trials.optim.one_bit_adam`)."""
POWER_SGD_KERNELS = 20
"""Kernels for each matrix that PowerSGD compresses at a rank of 2: three products, and eight to make P and Q
orthogonal each, column by column; a higher rank takes a QR decomposition, which is longer."""
POWER_SGD_PASSES = 12
"""Times that torch's hook of PowerSGD reads or writes all gradients: the residue is added (3), a copy made (2), P
and Q computed (2), their product written (1), which is taken off the copy (3), and read once more (1)."""
ROUNDING = 1e-9
"""Share of a step below which what overlaps is a rounding error."""


class PartSeconds(NamedTuple):
    """A number for each part of the model."""

    before: float
    """The number of what stands before the layers (features)."""
    layers: list[float]
    after: float
    """The number of what stands above the layers (head); with `before` it is the root unit of
    `fully_shard`."""

    @property
    def total(self) -> float:
        """The sum over all parts."""
        return self.before + sum(self.layers) + self.after

    @property
    def each(self) -> list[float]:
        """The numbers of features, each layer and the head."""
        return [self.before, *self.layers, self.after]


class PlannedStep(NamedTuple):
    """A model's step on a cluster: what all strategies with the same number of micro-batches share."""

    cluster: Cluster
    forward: PartSeconds
    """Seconds of a micro-batch's forward pass."""
    backward: PartSeconds
    """Seconds of a micro-batch's backward pass, without recomputation."""
    starts: PartSeconds
    """Seconds of `forward` that operations take however small they are; 0 on a GPU, which computes meanwhile."""
    parameters: PartSeconds
    """Numbers of dense parameters."""
    padded: PartSeconds
    """Numbers of dense parameters as all ranks gather them: `fully_shard` pads each parameter to equal
    shards."""
    padded_in_host: PartSeconds
    """Numbers of dense parameters as the ranks of a host gather them (HSDP)."""
    itemsizes: Itemsizes
    """Bytes per number of the dense part."""
    bandwidth: float
    """Bytes/s of a rank's memory, as far as reachable."""
    everywhere: Collectives
    """Collectives among all ranks."""
    bucket_bytes: int
    """Bytes of gradients that DistributedDataParallel reduces at a time; 0 on one rank."""
    in_host: Collectives
    """Collectives among the ranks of a host."""
    across: Collectives
    """Collectives among one rank of every host."""
    lookup: float
    """Seconds of lookup and the tables' update for the whole batch."""
    besides: float
    """Seconds of what a GPU's host does in a step beside starting the segments' operations; 0 on a CPU."""
    all_to_all: float
    """Seconds of the all-to-alls of ids and embeddings, forward and backward."""
    tables_reduce: float
    """Seconds of the all-reduce of replicated tables' gradients."""
    clips: bool = False
    """Whether gradients are clipped by their norm."""
    delayed: bool = False
    """Whether the host's update goes on while the next step runs (zero_offload)."""
    one_bit: bool = False
    """Whether the step is one of one-bit Adam's second stage (dp and zero1)."""
    low_rank: LowRankSizes | None = None
    """What PowerSGD sends of gradients, and what it holds; None without it."""
    data_hosts: int = 1
    data_per_host: int = 1
    """Data ranks: all, or those of one place in every tensor group; `everywhere` is among them."""
    sent: SentBySplit | None = None
    """What tensor groups send, if there are any."""

    @property
    def data_ranks(self) -> int:
        """Number of ranks that a weight's gradients are averaged over."""
        return self.data_hosts * self.data_per_host


class Communication(NamedTuple):
    """Seconds on links in all micro-batches, with the copies on the device that a collective needs."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    host_transfer: float = 0.0


def prepare(
    segments: Sequence[Segment],
    cluster: Cluster,
    placement: Placement,
    *,
    examples: int,
    training: TrainingConfig,
    tensor: int = 1,
) -> PlannedStep:
    """Returns what all strategies share whose micro-batches have so many examples, over so many tensor ranks."""
    # a CPU's ranks share it; what was measured needs no share of what a data sheet promises
    ranks = cluster.gpus_per_host if cluster.device == "cpu" else 1
    bandwidth = cluster.memory_bandwidth / ranks * (1.0 if cluster.verified else MEMORY_SHARE)
    passes = [segment_passes(segment, cluster, training, examples, bandwidth) for segment in segments]
    hosts, per_host = data_ranks(tensor, cluster.hosts, cluster.gpus_per_host)
    everywhere = collectives(cluster, hosts, per_host)
    of_tables = collectives(cluster, cluster.hosts, cluster.gpus_per_host)
    sent, ids = max(placement.all_to_all_bytes_per_rank), max(placement.id_bytes_per_rank)
    replicated = placement.replicated_gradient_bytes
    lookups = 1 + (FREQUENCY_DECAY_PASSES if training.frequency_decay else 0)
    return PlannedStep(
        cluster=cluster,
        forward=_parts(segments, [forward for forward, _ in passes]),
        backward=_parts(segments, [backward for _, backward in passes]),
        starts=_parts(segments, [start_seconds(segment, cluster) for segment in segments]),
        parameters=_parts(segments, [segment.parameters for segment in segments]),
        padded=_parts(segments, [_padded(segment, hosts * per_host) for segment in segments]),
        padded_in_host=_parts(segments, [_padded(segment, per_host) for segment in segments]),
        itemsizes=Itemsizes.of(training),
        bandwidth=bandwidth,
        everywhere=everywhere,
        bucket_bytes=everywhere.bucket_bytes() if hosts * per_host > 1 else 0,
        in_host=collectives(cluster, 1, per_host),
        across=collectives(cluster, hosts, 1),
        lookup=lookups * max(placement.lookup_bytes_per_rank) / bandwidth,
        besides=0.0 if cluster.device == "cpu" else HOST_STEP_SECONDS,
        all_to_all=(2 * of_tables.all_to_all(sent) + of_tables.all_to_all(ids)) if sent else 0.0,
        tables_reduce=of_tables.all_reduce(replicated) if replicated else 0.0,
        clips=training.clip_norm is not None,
        delayed=training.delayed_update,
        one_bit=training.optimizer == "onebit_adam",
        low_rank=low_rank_of(shapes_of(segments), training.power_sgd_rank),
        data_hosts=hosts,
        data_per_host=per_host,
        sent=sent_by_split(segments, cluster, tensor, examples) if tensor > 1 else None,
    )


def segment_seconds(step: PlannedStep) -> list[tuple[float, float]]:
    """Returns the seconds of forward and backward of features, each layer and the head, with those in which tensor
    groups send."""
    forward, backward = step.forward.each, step.backward.each
    for kind in (step.sent.all_reduce, step.sent.all_gather) if step.sent is not None else ():
        forward = [*map(float.__add__, forward, kind.forward)]
        backward = [*map(float.__add__, backward, kind.backward)]
    return list(zip(forward, backward, strict=True))


def price(step: PlannedStep, strategy: Strategy) -> StepTime:
    """Returns the seconds of a strategy, itemised."""
    micro_batches, again = strategy.micro_batches, RECOMPUTED[strategy.checkpointing]
    forward = micro_batches * step.forward.total
    recomputation = micro_batches * sum(step.forward.layers[again])
    backward = micro_batches * step.backward.total
    starts = micro_batches * step.starts.total
    starts_again = micro_batches * sum(step.starts.layers[again])
    compute_items = {
        "forward": forward - starts + micro_batches * step.besides,
        "backward": backward - BACKWARD_PASSES * starts,
        "recomputation": recomputation - starts_again,
        "operations": (1 + BACKWARD_PASSES) * starts + starts_again,
    }
    summed, gathered = split_seconds(step.sent, strategy) if step.sent is not None else (0.0, 0.0)
    replicated = strategy.dense == "dp" or step.one_bit
    engine = _fully_sharded if strategy.fully_sharded else _replicated if replicated else _zero
    elapsed, links = engine(step, strategy)
    compute = forward + backward + recomputation
    overlapped = compute + sum(links) - elapsed
    if overlapped < ROUNDING * elapsed:  # the same passes, summed in another order
        overlapped = 0.0
    hidden = overlapped - OVERLAP_SLOWDOWN * min(overlapped, compute)
    update, on_host = update_seconds(step, strategy), strategy.updated_on_host
    returned = 0.0  # the updated weights, as the model computes with them
    if strategy.dense == "zero_offload":
        own_bytes = step.itemsizes.computed * step.parameters.total / step.cluster.ranks
        returned = own_bytes / step.cluster.host_link_bandwidth
        # the update hides behind the next step; a CPU that is the device too has one memory for both
        if step.delayed and step.cluster.device != "cpu":
            hidden += min(_adamw(step, strategy), elapsed)
    items = compute_items | {
        "lookup": step.lookup,
        "optimizer": 0.0 if on_host else update,
        "all_to_all": step.all_to_all,
        "all_gather": links.all_gather + publication_seconds(step, strategy) + gathered,
        "reduce_scatter": links.reduce_scatter,
        "all_reduce": links.all_reduce + step.tables_reduce + summed,
        "host_transfer": links.host_transfer + (update if on_host else 0.0) + returned,
    }
    return StepTime(**items, hidden=hidden, total=sum(items.values()) - hidden)


def _parts(segments: Sequence[Segment], numbers: Sequence[float]) -> PartSeconds:
    """Sorts numbers of segments into parts: layers by name; of the rest, what comes before the first layer is
    `features`."""
    layers = [n for segment, n in zip(segments, numbers, strict=True) if segment.name.startswith("layer")]
    before = sum(n for segment, n in zip(segments, numbers, strict=True) if segment.name == "features")
    return PartSeconds(before, layers, sum(numbers) - sum(layers) - before)


def _padded(segment: Segment, ranks: int) -> float:
    """Returns a segment's parameters as `fully_shard` gathers them over so many ranks; unknown shapes count
    as they are."""
    return unit(segment.shapes, ranks).padded if segment.shapes else segment.parameters


def _passes(step: PlannedStep, strategy: Strategy) -> PassSeconds:
    """Returns the seconds of a micro-batch's passes, with recomputation in backward."""
    forward, backward = step.forward, step.backward
    layers = [*zip(forward.layers, backward.layers, strict=True)]
    again = RECOMPUTED[strategy.checkpointing]
    layers[again] = [(once, back + once) for once, back in layers[again]]
    return PassSeconds((forward.before, backward.before), layers, (forward.after, backward.after))


def _replicated(step: PlannedStep, strategy: Strategy) -> tuple[float, Communication]:
    """Prices dp: gradients are all-reduced behind the last micro-batch's backward, or momentum after it by one-bit
    Adam; returns seconds until both end."""
    passes = _passes(step, strategy)
    backward = [passes.after[1], *(seconds for _, seconds in reversed(passes.layers)), passes.before[1]]
    ended, spent = sum(backward), 0.0
    if step.one_bit:  # what is sent is made of all gradients
        spent = one_bit_all_reduce(step)
        ended += spent
    elif step.data_ranks > 1:
        sizes = [step.itemsizes.computed * values for values in reversed(step.parameters.each)]
        ended, spent = reduced_in_buckets(
            backward, sizes, step.bucket_bytes, partial(_averaged_seconds, step)
        )
    earlier = (strategy.micro_batches - 1) * (step.forward.total + sum(backward))
    return earlier + step.forward.total + ended, Communication(all_reduce=spent)


def _averaged_seconds(step: PlannedStep, size: float) -> float:
    """Returns the seconds in which so many bytes of gradients are averaged; with PowerSGD what is sent as it is, P
    and Q go one after another, and gradients pass through memory around them."""
    if step.low_rank is None:
        return all_reduce_seconds(step, size)
    share = size / (step.itemsizes.computed * step.parameters.total)
    sent = (step.itemsizes.computed * share * numbers for numbers in step.low_rank.by_collective)
    kernels = 0.0 if step.cluster.device == "cpu" else POWER_SGD_KERNELS * share * step.low_rank.matrices
    compression = kernels * KERNEL_SECONDS + POWER_SGD_PASSES * size / step.bandwidth
    return sum(map(step.everywhere.all_reduce, sent)) + compression


def one_bit_all_reduce(step: PlannedStep) -> float:
    """Returns the seconds in which one-bit Adam's compressed momentum is sent both ways; 0 on one rank."""
    size = ChunkLayout(round(step.parameters.total), step.cluster.ranks).vector_bytes
    return step.everywhere.all_to_all(size) + step.everywhere.all_gather(size)


def _zero(step: PlannedStep, strategy: Strategy) -> tuple[float, Communication]:
    """Prices zero1, zero2 and zero_offload: buckets of gradients are scattered behind backward, in the last
    micro-batch alone or in each; `publication_seconds` has what is gathered after the update."""
    passes = _passes(step, strategy)
    seconds = [passes.before[1], *(backward for _, backward in passes.layers), passes.after[1]]
    values = step.parameters.each
    reductions: list[Reduction | None] = [None] * len(seconds)
    for bucket in unit_buckets(step, strategy):
        reductions[bucket.start] = reduction(step, strategy, sum(values[place] for place in bucket))
    ended = scattered([*zip(seconds, reductions, strict=True)][::-1])
    buckets = [bucket for bucket in reductions if bucket is not None]
    spent = sum(bucket.copy_in + bucket.scatter for bucket in buckets)
    several = strategy.micro_batches - 1
    if strategy.dense == "zero1":
        earlier = several * (step.forward.total + sum(seconds))
        return earlier + step.forward.total + ended, Communication(reduce_scatter=spent)
    return strategy.micro_batches * (step.forward.total + ended), Communication(
        reduce_scatter=strategy.micro_batches * spent,
        host_transfer=strategy.micro_batches * sum(bucket.leave for bucket in buckets),
    )


def unit_buckets(step: PlannedStep, strategy: Strategy) -> list[range]:
    """Returns the buckets of ZeRO, by the places of features, layers and head in them."""
    smallest = step.bucket_bytes if strategy.dense == "zero1" else 0
    return zero_buckets(
        [round(step.itemsizes.computed * values) for values in step.parameters.each], smallest
    )


def reduction(step: PlannedStep, strategy: Strategy, values: float) -> Reduction:
    """Returns what a bucket of so many gradients costs. Those that stay are sent as they lie, but for a cast."""
    computed, reduced, _ = step.itemsizes
    copied = 0 if strategy.dense == "zero1" and computed == reduced else computed + reduced
    leaves = reduced * values / step.cluster.ranks if strategy.dense == "zero_offload" else 0.0
    return Reduction(
        copied * values / step.bandwidth,
        step.everywhere.reduce_scatter(reduced * values),
        leaves / step.cluster.host_link_bandwidth,
    )


def all_reduce_seconds(step: PlannedStep, size: float) -> float:
    """Returns the seconds to all-reduce so many bytes of gradients, with the passes over memory that cast
    them to what is sent, and back.

    Numbers smaller than the gradients go through a copy each way, to lie in the gradients' own memory
    (`trials.training.distributed.parallelize`).
    """
    computed, reduced, _ = step.itemsizes
    copies = 2 * (computed + reduced) + (4 * reduced if reduced < computed else 0)
    casts = copies / computed * size / step.bandwidth if reduced != computed else 0.0
    return casts + step.everywhere.all_reduce(size * reduced / computed)


def _fully_sharded(step: PlannedStep, strategy: Strategy) -> tuple[float, Communication]:
    """Prices shard_grad_op, fsdp and hsdp: in each micro-batch layers are gathered when needed, and their
    gradients scattered."""
    keep, micro_batches = strategy.dense == "shard_grad_op", strategy.micro_batches
    before, inner, after = step.padded_in_host if strategy.dense == "hsdp" else step.padded
    root = _unit(step, strategy, before + after)
    sizes = {values: _unit(step, strategy, values) for values in set(inner)}  # layers are often alike
    layers = [sizes[values] for values in inner]
    passes = _passes(step, strategy)
    elapsed = fully_sharded(passes, root, layers, keep=keep)
    if micro_batches > 1:
        earlier = [_before_the_last(strategy, unit) for unit in (root, *layers)]
        elapsed += (micro_batches - 1) * fully_sharded(passes, earlier[0], earlier[1:], keep=keep)
    gathers = 1 if keep else 2  # of a layer; the root's weights stay from forward to backward
    used = [root, *layers * gathers]
    units = [root, *layers]
    reductions = 1 if strategy.no_sync else micro_batches
    returns = 1 if strategy.no_sync or strategy.dense == "hsdp" else micro_batches
    return elapsed, Communication(
        all_gather=micro_batches * sum(unit.gather + unit.copy_out for unit in used),
        reduce_scatter=reductions * sum(unit.copy_in + unit.scatter for unit in units),
        all_reduce=sum(unit.reduce for unit in units),
        host_transfer=micro_batches * sum(unit.fetch for unit in used)
        + returns * sum(unit.give_back for unit in units),
    )


def _before_the_last(strategy: Strategy, unit: UnitSeconds) -> UnitSeconds:
    """Returns what a unit costs in a micro-batch that another one follows: what waits for the last is left out."""
    if strategy.no_sync:
        return unit._replace(copy_in=0.0, scatter=0.0, reduce=0.0, give_back=0.0)
    return unit._replace(reduce=0.0, give_back=0.0) if strategy.dense == "hsdp" else unit


def _unit(step: PlannedStep, strategy: Strategy, values: float) -> UnitSeconds:
    """Returns what a unit of so many parameters costs, padding included."""
    computed, reduced, _ = step.itemsizes
    group = step.in_host if strategy.dense == "hsdp" else step.everywhere
    state_shards = _state_shards(step, strategy)
    over_host_link = 0.0
    if strategy.offload:
        over_host_link = values * MASTER_BYTES / state_shards / step.cluster.host_link_bandwidth
    return UnitSeconds(
        fetch=over_host_link,
        gather=group.all_gather(computed * values),
        copy_out=2 * computed * values / step.bandwidth,  # read and written
        copy_in=(computed + reduced) * values / step.bandwidth,
        scatter=group.reduce_scatter(reduced * values),
        reduce=step.across.all_reduce(reduced * values / state_shards) if strategy.dense == "hsdp" else 0.0,
        give_back=over_host_link,
    )


def update_seconds(step: PlannedStep, strategy: Strategy) -> float:
    """Returns the seconds of the dense part's update."""
    return _adamw(step, strategy) + _clipping(step, strategy)


def _clipping(step: PlannedStep, strategy: Strategy) -> float:
    """Returns the seconds in which a rank's gradients are clipped by their norm (`trials.optim.adamw`), with the
    all-reduce of one number among the ranks that hold parts."""
    if not step.clips:
        return 0.0
    cluster = step.cluster
    if step.one_bit:
        return CLIP_BYTES * step.parameters.total / step.bandwidth + step.everywhere.all_reduce(MASTER_BYTES)
    size = CLIP_BYTES * step.parameters.total / _state_shards(step, strategy)
    seconds = size / step.bandwidth
    if strategy.updated_on_host:
        seconds = size * cluster.gpus_per_host / _host_bandwidth(cluster)
    if strategy.dense == "dp":
        return seconds
    group = step.in_host if strategy.dense == "hsdp" else step.everywhere
    return seconds + group.all_reduce(MASTER_BYTES)


def _host_bandwidth(cluster: Cluster) -> float:
    """Returns the bytes/s of a host's memory, which its ranks share."""
    return cluster.memory_bandwidth if cluster.device == "cpu" else HOST_MEMORY_BANDWIDTH


def _adamw(step: PlannedStep, strategy: Strategy) -> float:
    """Returns the seconds of AdamW on a rank's share of the state, on the device or, if offloaded, on the
    host's CPUs; of one-bit Adam's second stage, which every rank makes for all weights, without what is sent."""
    cluster, (computed, reduced, moment) = step.cluster, step.itemsizes
    on_host, shards, numbers = strategy.updated_on_host, _state_shards(step, strategy), step.parameters.total
    publish = MASTER_BYTES + computed if computed != MASTER_BYTES else 0
    if step.one_bit:
        pieces = 0 if cluster.device == "cpu" else ceil(numbers / AT_ONCE[cluster.device])
        gather = 2 * computed + MASTER_BYTES  # gradients put together in fp32, their places set to zero
        traffic = ONE_BIT_BYTES[cluster.device] + publish + gather
        return ONE_BIT_KERNELS * pieces * KERNEL_SECONDS + traffic * (numbers / step.bandwidth)
    values = numbers / shards
    state_bytes = (UPDATE_MASTERS * MASTER_BYTES + UPDATE_MOMENTS * moment) * values
    chunk = CHUNKS["cpu" if on_host else cluster.device]
    kernels = 0 if moment == MASTER_BYTES else UPDATE_KERNELS * ceil(values / chunk) * KERNEL_SECONDS
    if on_host:
        if strategy.dense == "zero_offload":  # gradients to fp32, weights to what the model computes with
            state_bytes += (reduced + 2 * MASTER_BYTES + computed) * values
        return kernels + state_bytes * cluster.gpus_per_host / _host_bandwidth(cluster)
    # around the update: with dp gradients together and weights to their copy (`MasterWeights`), with zero1 and
    # zero2 the own weights to theirs, and zeros into gradients that stay
    around = 0.0
    if strategy.dense == "dp":
        gather = computed + MASTER_BYTES + (computed if step.data_ranks > 1 else 0)
        around = (gather + publish) * numbers
    elif not strategy.fully_sharded:
        around = (publish / shards + (computed if strategy.dense == "zero1" else 0)) * numbers
    return kernels + (state_bytes + around) / step.bandwidth


def _state_shards(step: PlannedStep, strategy: Strategy) -> int:
    """Returns over how many ranks the optimizer's state is spread."""
    ranks = shards(strategy.dense, step.data_hosts, step.data_per_host)
    return max(1, ranks // strategy.pipeline)


def publication_seconds(step: PlannedStep, strategy: Strategy) -> float:
    """Returns the seconds in which zero1, zero2 and zero_offload gather, bucket by bucket, the weights that
    each rank has updated, as the model computes with them."""
    if strategy.dense not in ("zero1", "zero2", "zero_offload") or step.one_bit:
        return 0.0
    values = step.parameters.each
    buckets = [sum(values[place] for place in bucket) for bucket in unit_buckets(step, strategy)]
    return sum(step.everywhere.all_gather(step.itemsizes.computed * bucket) for bucket in buckets)
