"""What one-bit Adam or PowerSGD is worth on a cluster: the step beside AdamW's with whole gradients, and the
bandwidth below which it is the shorter one.

Both steps are priced as plans are, for the same strategy. The bandwidth that is varied is that of the slowest
link, the network between hosts or, on one host, the link inside it. A slower link makes AdamW's step longer by 32
times as many bytes, so that there is one bandwidth at most below which one-bit Adam pays.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from operator import lt
from typing import NamedTuple

from trials.cluster.cluster import Cluster
from trials.optim.compressed_all_reduce import Layout
from trials.optim.low_rank import low_rank_of
from trials.planner.pricing import Pricing
from trials.planner.segments import ITEMSIZES, shapes_of
from trials.planner.time.step_time import prepare, price
from trials.strategy import Strategy

SLOWEST, FASTEST = 1e5, 1e14
"""Bytes/s between which a bandwidth is looked for."""
CLOSE = 1.01
"""Ratio of two bandwidths that are taken for one."""
FP32_BYTES = 4


class Worth(NamedTuple):
    """A step whose gradients or momentum are compressed beside AdamW's."""

    seconds: float
    """Seconds of the compressed step: of one-bit Adam in its second stage, or with PowerSGD."""
    adamw_seconds: float
    """Seconds of AdamW's step with whole gradients."""
    times_less: float
    """Bytes that leave a rank in a ring all-reduce of fp32, by those of the compressed all-reduce."""
    bandwidth: float
    """Bytes/s of the slowest link."""
    pays_below: float | None
    """Bytes/s of that link below which the compressed step is shorter; None where it never is."""


def worth(pricing: Pricing, strategy: Strategy) -> Worth:
    """Returns what compression is worth for a job on a cluster of several ranks.

    Args:
        pricing: the prices of a job whose optimizer is one-bit Adam, or whose gradients PowerSGD compresses.
        strategy: how the model is held, dp or zero1 (dp alone with PowerSGD).
    """
    micro = pricing.micro_batch(strategy)
    segments, cluster = pricing.segments(micro), pricing.cluster
    layout = Layout(sum(segment.parameters for segment in segments), cluster.ranks)
    passes = 2 * (cluster.ranks - 1) / cluster.ranks
    ring = passes * FP32_BYTES * layout.numbers
    sent_bytes: float = layout.sent_bytes

    def seconds(bandwidth: float) -> tuple[float, float]:
        """Returns those of the compressed step and of AdamW's, where the slowest link has this bandwidth."""
        step = prepare(
            segments,
            _with_bandwidth(cluster, bandwidth),
            pricing.placement,
            examples=micro,
            training=pricing.training,
        )
        adamw = step._replace(one_bit=False, low_rank=None)
        return price(step, strategy).total, price(adamw, strategy).total

    if not pricing.one_bit:
        low_rank = low_rank_of(shapes_of(segments), pricing.training.power_sgd_rank)
        assert low_rank is not None
        sent_bytes = passes * ITEMSIZES[pricing.precision] * low_rank.sent
    bandwidth = _slowest(cluster)
    return Worth(
        *seconds(bandwidth), ring / sent_bytes, bandwidth, _pays_below(lambda each: lt(*seconds(each)))
    )


def _pays_below(pays: Callable[[float], bool]) -> float | None:
    """Returns the bandwidth below which something pays, by bisection of its logarithm."""
    low, high = SLOWEST, FASTEST
    if not pays(low):
        return None
    while high / low > CLOSE:
        middle = sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _slowest(cluster: Cluster) -> float:
    link = cluster.network if cluster.hosts > 1 else cluster.nvlink
    assert link is not None
    return link.bandwidth


def _with_bandwidth(cluster: Cluster, bandwidth: float) -> Cluster:
    """Returns the cluster with another bandwidth of its slowest link."""
    name = "network" if cluster.hosts > 1 else "nvlink"
    return cluster.replace(**{name: getattr(cluster, name).replace(bandwidth=bandwidth)})
