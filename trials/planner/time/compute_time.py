"""The seconds of a step's compute, by a roofline.

A CPU takes the longer of a segment's FLOPs at the reachable peak and of its traffic at the
reachable memory bandwidth (Williams et al. 2009), and what each operation costs however small. A GPU takes the
sum of both, as it runs kernels one after another, of which some are bound by the one and some by the other; or
what its host takes to start them, where that is longer. Backward counts twice: a product has two of the same size
(gradients of weights and of inputs), and other operations read the output's gradient and what was saved, and
write the input's.

Left out: shapes (thin products reach less than `MATMUL_SHARE`), TF32 (torch's default for fp32 is
without), layers that are compiled (`trials.training.compile_layers`). On a CPU the ranks of a host share its cores
and memory.
"""

from __future__ import annotations

from trials.cluster.cluster import Cluster
from trials.job import TrainingConfig
from trials.planner.device_constants import (
    LAUNCH_SECONDS,
    LAYER_MEMORY_SHARE,
    MATMUL_SHARE,
    OPERATION_SECONDS,
)
from trials.planner.segments import Segment
from trials.planner.tables.placement import Placement

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


def lookup_seconds(placement: Placement, training: TrainingConfig, bandwidth: float) -> float:
    """Returns the seconds of lookups and the tables' update on the rank that looks up most."""
    passes = FREQUENCY_DECAY_PASSES if training.frequency_decay else 0
    return (1 + passes) * max(placement.lookup_bytes_per_rank) / bandwidth
