"""A step in mixed precision as PyTorch took it in March 2022, when the DHEN paper appeared (arXiv 2203.11014).

The planner prices this project's engines. The paper names automatic mixed precision and bf16 for all-reduce and
all-to-all, and PyTorch 1.11 did these so:

- Autocast keeps weights and gradients in fp32; it casts each weight in forward and its gradient in backward.
  `FullyShardedDataParallel` had no precision of its own yet (pytorch/pytorch, pull request 74452 of 21 March
  2022), so its gathers and reduce-scatters sent fp32.
- A hook of DistributedDataParallel sends a bucket of 25 MiB as bf16 (`bf16_compress_hook`). HSDP's all-reduce
  across hosts is taken to be sent in bf16 too.
- In forward, gathers run ahead of compute. In backward a layer's gather waits for the reduce-scatter of the layer
  before, on the one stream that NCCL has, unless `backward_prefetch` is given (pull requests 70235, and 88428 of
  November 2022, which made it the default). It costs memory, which the paper holds against prefetching.
- Weights of a unit lie in one flat tensor, so nothing is copied out of a gather.

AdamW is taken to pass once over weights, gradients and bf16 moments. What of this the paper's runs had, they do
not say; each part can be switched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trials.planner.collectives import BUCKET_BYTES, OVERLAP_SLOWDOWN
from trials.planner.overlap import (
    BACKWARD_PASSES,
    PassSeconds,
    UnitSeconds,
    fully_sharded,
    reduced_in_buckets,
)
from trials.planner.step_time import UPDATE_MASTERS, UPDATE_MOMENTS, PartSeconds, PlannedStep
from trials.records.strategy import Dense, shards

FP32, BF16 = 4, 2
"""Bytes of a number."""
CAST = FP32 + BF16
"""Bytes that go through memory for a number that is cast."""
HOOK = CAST + 2 * BF16 + CAST
"""Bytes per gradient that go through memory in `bf16_compress_hook`: cast, divided by the number of ranks, cast
back."""


class Stock(NamedTuple):
    """PyTorch 1.11 in mixed precision, or a part of what sets it apart from today's."""

    sharded: int = FP32
    """Bytes per number in gathers and reduce-scatters."""
    prefetch: bool = False
    """Whether a layer is gathered in backward while the layer above computes."""
    bucket_bytes: int | None = BUCKET_BYTES
    """Bytes of fp32 gradients that DistributedDataParallel reduces at a time; None for as many as the planner
    sends at a time, once they are bf16."""


def step_seconds(step: PlannedStep, dense: Dense, stock: Stock) -> float:
    """Returns the seconds of one step of dp, hsdp or fsdp, without other techniques.

    Args:
        step: what the planner knows of the model and the cluster, with compute in bf16.
        dense: how the dense part is held.
        stock: what PyTorch does.
    """
    passes = _passes(step, dense, stock)
    elapsed, links = (_replicated if dense == "dp" else _sharded)(step, dense, passes, stock)
    compute = sum(map(sum, (passes.before, *passes.layers, passes.after)))
    overlapped = max(0.0, compute + links - elapsed)
    hidden = overlapped - OVERLAP_SLOWDOWN * min(overlapped, compute)
    state = UPDATE_MASTERS * FP32 + UPDATE_MOMENTS * BF16
    update = state * step.parameters.total / _state_shards(step, dense) / step.bandwidth
    besides = step.besides + step.lookup + step.all_to_all + step.tables_reduce + update
    return compute + links - hidden + besides


def _state_shards(step: PlannedStep, dense: Dense) -> int:
    return shards(dense, step.cluster.hosts, step.cluster.gpus_per_host)


def _passes(step: PlannedStep, dense: Dense, stock: Stock) -> PassSeconds:
    """Returns the planner's seconds of compute, with what casts take of them."""
    cast = CAST if dense == "dp" or stock.sharded == FP32 else 0
    hook = HOOK if dense == "dp" else 0

    def both(forward: float, values: float) -> tuple[float, float]:
        casts, hooks = cast * values / step.bandwidth, hook * values / step.bandwidth
        return forward + casts, BACKWARD_PASSES * forward + casts + hooks

    forward, values = step.forward, step.parameters
    layers = [both(*layer) for layer in zip(forward.layers, values.layers, strict=True)]
    return PassSeconds(both(forward.before, values.before), layers, both(forward.after, values.after))


def _replicated(step: PlannedStep, _: Dense, passes: PassSeconds, stock: Stock) -> tuple[float, float]:
    """Returns the seconds until compute and all-reduces of dp have ended, and those of the all-reduces."""
    backward = [passes.after[1], *(seconds for _, seconds in reversed(passes.layers)), passes.before[1]]
    before, layers, after = step.parameters
    sizes = [FP32 * values for values in (after, *reversed(layers), before)]

    def all_reduce(size: float) -> float:
        return step.everywhere.all_reduce(size * BF16 / FP32)

    bucket_bytes = stock.bucket_bytes or step.bucket_bytes * FP32 // BF16
    ended, spent = reduced_in_buckets(backward, sizes, bucket_bytes, all_reduce)
    forward = passes.before[0] + sum(seconds for seconds, _ in passes.layers) + passes.after[0]
    return forward + ended, spent


def _sharded(step: PlannedStep, dense: Dense, passes: PassSeconds, stock: Stock) -> tuple[float, float]:
    """Returns the seconds until compute and collectives of hsdp or fsdp have ended, and those of collectives."""
    padded: PartSeconds = step.padded_in_host if dense == "hsdp" else step.padded
    root = _unit(step, dense, padded.before + padded.after, stock)
    layers = [_unit(step, dense, values, stock) for values in padded.layers]
    if stock.prefetch:
        elapsed = fully_sharded(passes, root, layers, keep=False)
    else:
        elapsed = _one_after_another(passes, root, layers)
    gathers = root.gather + 2 * sum(unit.gather for unit in layers)
    return elapsed, gathers + sum(unit.copy_in + unit.scatter + unit.reduce for unit in (root, *layers))


def _unit(step: PlannedStep, dense: Dense, values: float, stock: Stock) -> UnitSeconds:
    group = step.in_host if dense == "hsdp" else step.everywhere
    shard = values / _state_shards(step, dense)
    across = 2 * CAST * shard / step.bandwidth + step.across.all_reduce(BF16 * shard)
    return UnitSeconds(
        fetch=0.0,
        gather=group.all_gather(stock.sharded * values),
        copy_out=0.0,
        # autograd puts the gradients of a flat tensor's parts together
        copy_in=2 * stock.sharded * values / step.bandwidth,
        scatter=group.reduce_scatter(stock.sharded * values),
        reduce=across if dense == "hsdp" else 0.0,
        give_back=0.0,
    )


def _one_after_another(passes: PassSeconds, root: UnitSeconds, layers: Sequence[UnitSeconds]) -> float:
    """Returns the seconds until compute and collectives have ended where backward does not gather ahead."""
    link = root.gather
    compute = link + passes.before[0]
    for unit, (forward, _) in zip(layers, passes.layers, strict=True):
        link += unit.gather
        compute = max(compute, link) + forward
    compute += passes.after[0]
    link, across = max(compute, link), 0.0
    compute += passes.after[1]
    for unit, (_, backward) in zip(reversed(layers), reversed(passes.layers), strict=True):
        compute = max(compute, link + unit.gather) + backward + unit.copy_in
        link = compute + unit.scatter
        across = max(across, link) + unit.reduce
    compute += passes.before[1] + root.copy_in
    link = max(link, compute) + root.scatter
    return max(link, max(across, link) + root.reduce)
