"""The seconds of a step's compute: measured by kind of part on a CPU that was, by a roofline elsewhere.

By the roofline a CPU takes the longer of a segment's FLOPs at the reachable peak and of its traffic at the
reachable memory bandwidth (Williams et al. 2009), and what each operation costs however small. A GPU takes the
sum of both, as it runs kernels one after another, of which some are bound by the one and some by the other; or
what its host takes to start them, where that is longer. Backward counts twice: a product has two of the same size
(gradients of weights and of inputs), and other operations read the output's gradient and what was saved, and
write the input's.

Left out of the roofline: shapes (thin products reach less than `MATMUL_SHARE`), TF32 (torch's default for fp32 is
without), layers that are compiled (`trials.training.compile_layers`). On a CPU the ranks of a host share its cores
and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from dhen.inputs.features import ADMISSION, TABLE_UPDATE
from dhen.memory.tape import FP32_BYTES
from trials.cluster.cluster import Cluster
from trials.cluster.part_costs import BETWEEN, DECAYED, LOSS, PartCosts, PartSeconds
from trials.job import TrainingConfig
from trials.planner.device_constants import (
    HOST_STEP_SECONDS,
    LAUNCH_SECONDS,
    LAYER_MEMORY_SHARE,
    MATMUL_SHARE,
    OPERATION_SECONDS,
)
from trials.planner.segments import Segment
from trials.planner.tables.placement import Placement

BESIDE_PASSES = (ADMISSION, TABLE_UPDATE)
"""Kinds of parts that come once in a step, before forward and after backward."""
BACKWARD_PASSES = 2
"""Number of forward passes that backward costs as much as, by the roofline."""


def measured(cluster: Cluster, training: TrainingConfig) -> PartCosts | None:
    """Returns what parts take on the cluster's CPU, where that was measured in the training's precision."""
    costs = cluster.part_costs
    return costs if costs is not None and costs.precision == training.precision else None


def segment_passes(
    segment: Segment,
    costs: PartCosts | None,
    cluster: Cluster,
    training: TrainingConfig,
    examples: int,
    bandwidth: float,
) -> PartSeconds:
    """Returns the seconds of a segment's passes: as measured by kind of part, or by the roofline."""
    if costs is not None and segment.parts:
        passes = [costs.of_part(part, examples) for part in segment.parts if part.kind not in BESIDE_PASSES]
        return PartSeconds(sum(each.forward for each in passes), sum(each.backward for each in passes))
    ranks = cluster.gpus_per_host if cluster.device == "cpu" else 1
    peak = getattr(cluster.peak_flops, training.precision) / ranks * MATMUL_SHARE
    reached = bandwidth * (LAYER_MEMORY_SHARE if cluster.device == "cpu" else 1.0)
    products, moved = segment.flops * examples / peak, segment.footprint.traffic / reached
    forward = from_sizes(
        max(products, moved) if cluster.device == "cpu" else products + moved, segment, cluster
    )
    return PartSeconds(forward, BACKWARD_PASSES * forward)


def from_sizes(seconds: float, segment: Segment, cluster: Cluster) -> float:
    """Returns the seconds of a segment's forward pass in which computing takes so many: on a CPU operations come
    on top, on a GPU they are started meanwhile."""
    if cluster.device == "cpu":
        return seconds + segment.operations * OPERATION_SECONDS
    return max(seconds, segment.operations * LAUNCH_SECONDS)


IDS, LOOKED_UP = 4, 6
"""Places among the sizes of lookups of the ids, and of the numbers that are looked up."""
FREQUENCY_DECAY_PASSES = 3
"""Passes of `training.frequency_decay` over what was looked up: embeddings and their gradients are read, gradients
are written."""


def lookup_seconds(
    segments: Sequence[Segment],
    costs: PartCosts | None,
    placement: Placement,
    training: TrainingConfig,
    examples: int,
    bandwidth: float,
) -> float:
    """Returns the seconds of lookups and the tables' update; where parts were measured, of the update alone, since
    lookups are part of `features`, and of finding the rows of growing tables, for which every rank has the ids of
    all."""
    passes = FREQUENCY_DECAY_PASSES if training.frequency_decay else 0
    if costs is None:
        return (1 + passes) * max(placement.lookup_bytes_per_rank) / bandwidth
    updates = [part for segment in segments for part in segment.parts if part.kind == TABLE_UPDATE]
    numbers = sum(part.sizes(examples)[LOOKED_UP] for part in updates)
    decayed = DECAYED if training.table_decay else ""
    seconds = sum(sum(costs.seconds(part.kind + decayed, part.sizes(examples))) for part in updates)
    admissions = [part for segment in segments for part in segment.parts if part.kind == ADMISSION]
    of_all = examples * len(placement.bytes_per_rank)
    ids = sum(part.sizes(of_all)[IDS] for part in admissions)
    seconds += sum(costs.seconds(ADMISSION, (1, ids))) if admissions else 0.0
    return seconds + passes * FP32_BYTES * numbers / bandwidth


def seconds_besides(
    segments: Sequence[Segment], costs: PartCosts | None, cluster: Cluster, examples: int
) -> float:
    """Returns the seconds of a step beside its segments: where parts were measured, of the loss and of what lies
    between parts; on a GPU those in which its host starts all else."""
    if costs is None:
        return 0.0 if cluster.device == "cpu" else HOST_STEP_SECONDS
    operations = sum(segment.operations for segment in segments)
    between, loss = costs.seconds(BETWEEN, (1, operations)), costs.seconds(LOSS, (1, examples))
    return sum(between) + sum(loss)
