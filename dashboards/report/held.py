"""How a candidate is held in memory: a bar for each technique of its plan, against the memory of a rank."""

from __future__ import annotations

from typing import Any

from dashboards.figures.memory.rungs import ITEMS as LADDER_ITEMS
from dashboards.figures.memory.rungs import nearest_of_each_way
from dashboards.units import byte_size
from trials.record import Attempt, Outcome, PlanSummary, RejectedStrategy, TrialRecord

MOST_BARS = 7
"""Techniques that were not chosen and have a bar; of the others one sentence tells."""
ITEMS = LADDER_ITEMS | {
    "input_batch": "input batch",
    "context": "context",
    "reserve": "allocator reserve",
}
"""Items of a plan's memory in words, in the order of the bar."""
CHOSEN, REJECTED, RAN_OUT = "chosen", "rejected", "ran out"


def held(trial: TrialRecord) -> dict[str, Any] | None:
    """Returns the bars, those of cheaper techniques first, and what the plan says besides; None without a plan."""
    plan = trial.plan.summary
    if plan is None:
        return None
    nearest, more = _nearest(plan)
    ran_out = [_ran_out(attempt) for attempt in trial.attempts if attempt.outcome is Outcome.OUT_OF_MEMORY]
    tried = {bar["name"] for bar in ran_out}
    return {
        "bars": [
            *(_rejected(strategy) for strategy in nearest if strategy.strategy not in tried),
            *ran_out,
            *_chosen(plan, tried),
        ],
        "more": more,
        "reason": plan.reason,
        "remedy": plan.remedy,
        "faster": plan.faster,
        "notes": [*plan.other_shapes, *plan.notes],
        "margin": plan.margin_bytes,
        "fits": plan.fits,
        "hostBytes": plan.host_bytes,
    }


def _chosen(plan: PlanSummary, tried: set[str]) -> list[dict[str, Any]]:
    if plan.strategy is None or plan.peak_bytes is None or plan.strategy in tried:
        return []
    known = [(words, plan.memory_bytes.get(item, 0)) for item, words in ITEMS.items()]
    others = [(item.replace("_", " "), size) for item, size in plan.memory_bytes.items() if item not in ITEMS]
    items = [(words, size) for words, size in (*known, *others) if size]
    why = "chosen: the least that fits" if plan.fits else "lacks least, and does not fit"
    return [
        {
            "name": plan.strategy,
            "bytes": plan.peak_bytes,
            "why": why,
            "state": CHOSEN if plan.fits else REJECTED,
            "lacking": 0,
            "items": items,
            "at": plan.peak_at,
        }
    ]


def _rejected(strategy: RejectedStrategy) -> dict[str, Any]:
    lacking = strategy.lacking_bytes
    why = f"lacks {byte_size(lacking)}" if lacking else "fits, but its step takes longer"
    return {
        "name": strategy.strategy,
        "bytes": strategy.memory_bytes,
        "lacking": lacking,
        "why": why,
        "state": REJECTED,
    }


def _ran_out(attempt: Attempt) -> dict[str, Any]:
    needed, limit = attempt.needed_bytes, attempt.limit_bytes
    sizes = f": a rank needed {byte_size(needed)} of {byte_size(limit)}" if needed and limit else ""
    predicted = attempt.predicted_bytes
    planned = f" (predicted: {byte_size(predicted)})" if predicted else ""
    return {
        "name": attempt.strategy,
        "bytes": needed or predicted or 0,
        "lacking": max(0, needed - limit) if needed and limit else 0,
        "why": f"tried, ran out of memory{sizes}{planned}",
        "state": RAN_OUT,
    }


def _nearest(plan: PlanSummary) -> tuple[list[RejectedStrategy], str | None]:
    """Returns the rejected strategies that have a bar, one for each way to hold the model, and a sentence on the
    others."""
    ways = nearest_of_each_way(plan)
    nearest = sorted(ways, key=lambda strategy: strategy.lacking_bytes)[:MOST_BARS]
    shown = {strategy.strategy for strategy in nearest}
    left = [strategy.lacking_bytes for strategy in ways if strategy.strategy not in shown]
    more = f"{len(left)} more lack {byte_size(min(left))} to {byte_size(max(left))}." if left else None
    return [strategy for strategy in plan.rejected if strategy.strategy in shown], more
