"""What overlaps with what: the passes of one micro-batch played out on a clock for compute and one for each link.

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


class Unit(NamedTuple):
    """Seconds for what `fully_shard` gathers and reduces at once: a layer, or the root unit (all around them)."""

    fetch: float
    """Its shard from host to device; 0 but for offload."""
    gather: float
    copy_out: float
    """On the device, of gathered weights to their places."""
    copy_in: float
    """On the device, of gradients into one row for the reduce-scatter."""
    scatter: float
    reduce: float
    """All-reduce of its shard across hosts; 0 but for HSDP."""
    give_back: float
    """Its gradients' shard from device to host; 0 but for offload."""


class Passes(NamedTuple):
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
    """Backward with DistributedDataParallel's all-reduces: seconds until both have ended, seconds of all-reduce.

    Args:
        backward: seconds by segment, in backward's order.
        gradient_bytes: of each segment's parameters; they come evenly over its backward.
        bucket_bytes: gradients that are reduced at a time.
        all_reduce: seconds for so many bytes.
    """
    a_bucket = all_reduce(bucket_bytes)
    now = link = spent = 0.0
    waiting = 0.0  # bytes in a bucket that is not full yet
    for seconds, size in zip(backward, gradient_bytes, strict=True):
        full, left = divmod(waiting + size, bucket_bytes)
        if full:
            first = now + seconds * (bucket_bytes - waiting) / size
            last = now + seconds * (size - left) / size
            link = max(max(link, first) + full * a_bucket, max(link, last) + a_bucket)
            spent += full * a_bucket
        now, waiting = now + seconds, left
    if waiting:
        rest = all_reduce(waiting)
        link, spent = max(link, now) + rest, spent + rest
    return max(now, link), spent


def fully_sharded(passes: Passes, root: Unit, layers: Sequence[Unit], *, keep: bool) -> float:
    """Seconds until compute and all links have ended; `keep`: weights stay gathered until backward (ZeRO-2)."""
    now, link = _forward(passes, root, layers)
    return _backward(passes, root, layers, keep, now, link)


def _forward(passes: Passes, root: Unit, layers: Sequence[Unit]) -> tuple[float, float]:
    """The clocks of compute and of the gathers' link at the end of forward."""
    link = root.fetch + root.gather
    have_weights = link + root.copy_out
    now = have_weights + passes.before[0]
    for unit, (forward, _) in zip(layers, passes.layers, strict=True):
        link = max(link, have_weights) + unit.fetch + unit.gather
        have_weights = max(now, link) + unit.copy_out
        now = have_weights + forward
    return now + passes.after[0], link


def _backward(
    passes: Passes, root: Unit, layers: Sequence[Unit], keep: bool, now: float, link: float
) -> float:
    """From the clocks at its start; the root's weights are still there."""
    after = scattered = 0.0
    # a layer's weights are asked for when the one above has its own, before that one's reduce-scatter
    gathers = [] if keep else [unit.fetch + unit.gather for unit in layers]
    gathered = link = max(link, now) + gathers.pop() if gathers else 0.0
    now += passes.after[1]
    for unit, (_, backward) in zip(reversed(layers), reversed(passes.layers), strict=True):
        if not keep:
            now = max(now, gathered) + unit.copy_out
            if gathers:
                gathered = link = max(link, now) + gathers.pop()
        now = max(now + backward, scattered) + unit.copy_in
        link, after = _reduce(unit, now, link, after)
        scattered = link
    now = max(now + passes.before[1], scattered) + root.copy_in
    return max(now, *_reduce(root, now, link, after))


def _reduce(unit: Unit, now: float, link: float, after: float) -> tuple[float, float]:
    """When a unit's gradients are scattered, and what comes after that on other links has ended."""
    link = max(link, now) + unit.scatter
    rest = unit.reduce + unit.give_back
    return link, (max(after, link) + rest if rest else after)
