"""The step of ranks that share a training on a CPU on which that was measured (`trials.cluster.shared_costs`).

Compute is the sum of parts that was measured for one rank; what an engine adds is measured as a whole, so nothing
is hidden. Items hold what an engine takes around its collectives too: the hooks, copies and waits of
`fully_shard`'s gathers are part of `all_gather`.

Left out: that ranks have different work to do; hsdp's all-reduce across hosts waits for the last micro-batch, and
is counted in every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trials.cluster.cluster import Cluster
from trials.cluster.part_costs import UPDATE, PartCosts, dot
from trials.cluster.shared_costs import SharedCosts
from trials.planner.estimates import StepTime
from trials.planner.segments import Segment
from trials.planner.tables.placement import Placement
from trials.strategy import Strategy


class SharedStep(NamedTuple):
    """What all strategies of a shared step have in common."""

    costs: PartCosts
    shared: SharedCosts
    sizes: tuple[float, ...]
    """The dense part's sizes (`engine_sizes`)."""
    replicated_tables: float
    """Seconds of tables that every rank holds whole."""
    sharded_tables: float
    counting: float
    """Seconds of a micro-batch in which memory is counted."""


def engine_sizes(segments: Sequence[Segment]) -> tuple[float, ...]:
    """Returns what an engine's costs grow with: 1, units, tensors, numbers."""
    layers = sum(segment.name.startswith("layer") for segment in segments)
    tensors = sum(len(segment.shapes) for segment in segments)
    return (1.0, layers + 1.0, tensors, sum(segment.parameters for segment in segments))


SHARDED = slice(0, 4)
"""Sizes of tables that are those of sharded ones."""


def table_sizes(placement: Placement) -> tuple[float, ...]:
    """Returns what the tables' costs grow with: of sharded ones whether there are any, their number, bytes of
    embeddings and of ids that a rank sends; of replicated ones whether there are any, their number and bytes."""
    sharded, replicated = len({shard.table for shard in placement.shards}), len(placement.replicated)
    return (
        float(sharded > 0),
        sharded,
        max(placement.all_to_all_bytes_per_rank),
        max(placement.id_bytes_per_rank),
        float(replicated > 0),
        replicated,
        placement.replicated_gradient_bytes,
    )


def shared_step(
    segments: Sequence[Segment], costs: PartCosts | None, placement: Placement, cluster: Cluster
) -> SharedStep | None:
    """Returns what a shared step has in common; None where it was not measured."""
    shared, sizes = costs.shared if costs is not None else None, table_sizes(placement)
    if costs is None or shared is None or shared.ranks != f"{cluster.hosts}x{cluster.gpus_per_host}":
        return None
    if shared.tables is None and any(sizes):
        return None
    by_size = [cost * size for cost, size in zip(shared.tables or (0.0,) * len(sizes), sizes, strict=True)]
    operations = sum(segment.operations for segment in segments)
    return SharedStep(
        costs,
        shared,
        engine_sizes(segments),
        replicated_tables=sum(by_size[SHARDED.stop :]),
        sharded_tables=sum(by_size[SHARDED]),
        counting=dot(shared.counting, (1, operations)),
    )


def shared_time(
    step: SharedStep,
    strategy: Strategy,
    own: dict[str, float],
    share: float,
    slower: float,
    *,
    several: bool = True,
) -> StepTime | None:
    """Returns the seconds of a strategy, itemised; None for an engine that was not measured.

    Args:
        step: what all strategies have in common.
        strategy: how the dense part is held.
        own: the items `forward`, `backward` and `recomputation` of all micro-batches, and what tensor groups send.
        share: share of the optimizer's state that a rank has.
        slower: seconds that the update takes longer than with moments in fp32 and without clipping.
        several: whether there are gradients to reduce: a tensor group may have all ranks.
    """
    cost = step.shared.engines.get(strategy.dense)
    if cost is None:
        return None
    micro_batches = strategy.micro_batches
    compute = sum(own[name] for name in ("forward", "backward", "recomputation"))
    items = dict.fromkeys(StepTime.model_fields, 0.0) | own
    items["forward"] += micro_batches * step.counting
    items["lookup"], items["all_to_all"] = step.replicated_tables, step.sharded_tables
    passes, reduced, update = (dot(each, step.sizes) for each in (cost.passes, cost.reduced, cost.update))
    of_passes, of_reduced = _items(strategy)
    if several:
        items[of_passes] += micro_batches * passes
        items[of_reduced] += _reductions(strategy) * reduced
    items[of_reduced] += dot(step.shared.waits, (1, compute, step.sizes[-1]))
    items |= _update(step, strategy, update + slower, share, items)
    return StepTime(**items | {"total": sum(items.values())})


def _reductions(strategy: Strategy) -> int:
    """Returns the number of micro-batches whose gradients are reduced."""
    waits = strategy.no_sync or strategy.dense in ("dp", "zero1")
    return 1 if waits else strategy.micro_batches


def _items(strategy: Strategy) -> tuple[str, str]:
    """Returns the items of passes, and of the reduction beside them."""
    if strategy.dense == "dp":
        return "all_reduce", "all_reduce"
    return "all_gather" if strategy.fully_sharded else "reduce_scatter", "reduce_scatter"


def _update(
    step: SharedStep, strategy: Strategy, seconds: float, share: float, items: dict[str, float]
) -> dict[str, float]:
    """Returns the items of the update: of ZeRO's, what is left beside the optimizer is the gather of weights."""
    if strategy.updated_on_host:
        return {"host_transfer": seconds}
    if strategy.dense not in ("zero1", "zero2"):
        return {"optimizer": seconds}
    _, _, tensors, numbers = step.sizes
    alone = sum(step.costs.seconds(UPDATE, (1, share * numbers, tensors)))
    optimizer = min(seconds, alone)
    return {"optimizer": optimizer, "all_gather": items["all_gather"] + seconds - optimizer}
