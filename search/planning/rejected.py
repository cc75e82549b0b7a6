"""What a trial's record keeps of the strategies that its plan passed over.

A ladder has dozens of them, most of which differ in nothing but the number of micro-batches. So all are kept by
name with what they lack, and only one of each way to hold the model with its items and its reason, the simplest
first: a record of some kilobytes would else have tens.
"""

from __future__ import annotations

from collections.abc import Collection

from trials.planner.estimates import PricedStrategy
from trials.planner.plan import Plan
from trials.record import RejectedStrategy

MOST_ITEMISED = 12
"""Largest number of strategies whose items are kept."""
NOT_ITEMS = {"activations_by_layer", "host", "margin", "peak_at", "servers"}
"""Fields of an estimate that are no items of the device's memory."""


def memory_items(priced: PricedStrategy) -> dict[str, int]:
    """Predicted bytes on the fullest rank at the peak, by item."""
    items: dict[str, int] = priced.memory.model_dump(exclude=NOT_ITEMS)
    return items


def rejected(job_plan: Plan, taken: PricedStrategy, ran_out: Collection[str]) -> tuple[RejectedStrategy, ...]:
    """Other strategies with no more techniques than the one taken, or than one where nothing fits; in the ladder's
    order.

    Args:
        job_plan: the priced ladder.
        taken: the strategy that the trial is held by.
        ran_out: names of strategies that were tried before and ran out of memory, which are not among them.
    """
    most = len(taken.strategy.techniques) if taken.fits else 1
    passed_over = [
        priced
        for priced in job_plan.up_to(most)
        if priced is not taken and priced.strategy.name not in ran_out
    ]
    itemised = _itemised(passed_over)
    return tuple(_kept(priced, whole=priced.strategy.name in itemised) for priced in passed_over)


def _itemised(passed_over: Collection[PricedStrategy]) -> set[str]:
    """Names of the strategies whose items are kept: of each way to hold the model, in one batch and in several,
    the one that lacks least."""
    nearest: dict[tuple[str, bool], PricedStrategy] = {}
    for priced in passed_over:
        way = priced.strategy.held_as, priced.strategy.micro_batches > 1
        if way not in nearest or priced.lacking_bytes < nearest[way].lacking_bytes:
            nearest[way] = priced
    simplest_first = sorted(nearest.values(), key=lambda priced: (_size(priced), priced.lacking_bytes))
    return {priced.strategy.name for priced in simplest_first[:MOST_ITEMISED]}


def _size(priced: PricedStrategy) -> int:
    return len(priced.strategy.techniques)


def _kept(priced: PricedStrategy, *, whole: bool) -> RejectedStrategy:
    details = {}
    if whole:
        items = {name: size for name, size in memory_items(priced).items() if size}
        details = {"items": items, "reason": priced.reason, "step_seconds": priced.time.total}
    return RejectedStrategy(
        strategy=priced.strategy.name,
        memory_bytes=priced.memory.total,
        lacking_bytes=priced.lacking_bytes,
        **details,
    )
