"""The rungs of a trial's ladder: the techniques that were passed over, those that were tried, the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dashboards.figures.techniques import in_order
from dashboards.units import byte_size
from trials.record import Attempt, Outcome, PlanSummary, RejectedStrategy, TrialRecord

ITEMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "embedding_shards": "embedding tables",
    "unsharded_layer": "gathered parameters",
    "communication_buffers": "communication buffers",
}
"""Items of a peak, and what they are called."""
OTHERS, TOGETHER = "all else", "not itemised"
"""What further items are called together, and a peak of whose items the record knows nothing."""
MOST_RUNGS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One technique of the ladder."""

    strategy: str
    verdict: str
    """In a few words: `lacks 1.2 MiB`, `ran out of memory`, `fits, slower`, `chosen`."""
    reason: str
    """Why, in a sentence; empty where the record does not say."""
    fits: bool
    chosen: bool
    items: tuple[tuple[str, int], ...]
    """Predicted bytes by item, in the order of `ITEMS`; `not itemised` alone where only their sum is known."""
    measured_bytes: int | None = None
    """Peak as it was counted, where the trial was trained with this technique."""

    @property
    def total(self) -> int:
        """The predicted peak."""
        return sum(size for _, size in self.items)


def last_plan(trial: TrialRecord) -> PlanSummary | None:
    """The plan that the trial came to, after those whose attempts ran out of memory."""
    return trial.plan.summary or trial.first_plan


def passed_over(trial: TrialRecord) -> int:
    """Number of strategies that the trial's last plan passed over, and of attempts that ran out of memory."""
    plan = last_plan(trial)
    ran_out = sum(attempt.outcome is Outcome.OUT_OF_MEMORY for attempt in trial.attempts)
    return (len(plan.rejected) if plan else 0) + ran_out


def rungs(trial: TrialRecord, plan: PlanSummary) -> Iterator[Rung]:
    """Techniques passed over, those that were tried, the one that the trial came to."""
    tried = {attempt.strategy for attempt in trial.attempts}
    rejected = {each.strategy: each for each in _shown(plan) if each.strategy not in tried}
    for name in in_order(rejected)[:MOST_RUNGS]:
        yield _of_rejected(rejected[name], plan)
    for attempt in trial.attempts[:-1]:
        yield _of_attempt(attempt, last=False)
    if trial.attempts and trial.attempts[-1].plan is not None:
        yield _of_attempt(trial.attempts[-1], last=True)
    elif plan.strategy is not None:
        yield _of_plan(plan)


def _shown(plan: PlanSummary) -> tuple[RejectedStrategy, ...]:
    """The strategies whose items are kept; of older versions the nearest of each way to hold the model."""
    itemised = tuple(each for each in plan.rejected if each.items)
    if itemised:
        return itemised
    return nearest_of_each_way(plan)


def nearest_of_each_way(plan: PlanSummary) -> tuple[RejectedStrategy, ...]:
    """Of the rejected strategies the one that lacks least for each way to hold the model, in the plan's order."""
    nearest: dict[str, RejectedStrategy] = {}
    for each in plan.rejected:
        if each.held_as not in nearest or each.lacking_bytes < nearest[each.held_as].lacking_bytes:
            nearest[each.held_as] = each
    return tuple(nearest.values())


def _of_rejected(rejected: RejectedStrategy, plan: PlanSummary) -> Rung:
    fits = rejected.lacking_bytes == 0
    return Rung(
        strategy=rejected.strategy,
        verdict=_slower(rejected, plan) if fits else f"lacks {byte_size(rejected.lacking_bytes)}",
        reason=rejected.reason,
        fits=fits,
        chosen=False,
        items=_items(rejected.items, rejected.memory_bytes),
    )


def _slower(rejected: RejectedStrategy, plan: PlanSummary) -> str:
    """How much slower a step of a strategy is that fits too, where that is known."""
    chosen = plan.whole_step_seconds
    if rejected.step_seconds is None or not chosen or rejected.step_seconds <= chosen:
        return "fits, not chosen"
    return f"fits, its step takes {rejected.step_seconds / chosen:.2f}x as long"


def _of_attempt(attempt: Attempt, *, last: bool) -> Rung:
    plan = attempt.plan
    ran_out = attempt.outcome is Outcome.OUT_OF_MEMORY
    verdict = "chosen" if last else "ran again"
    if ran_out:
        verdict = "ran out of memory" if attempt.needed_bytes is None else _needed(attempt)
    elif attempt.measured_bytes:
        verdict += f", measured {byte_size(attempt.measured_bytes)}"
    return Rung(
        strategy=attempt.strategy,
        verdict=verdict,
        reason=plan.reason if plan else "",
        fits=not ran_out,
        chosen=last and not ran_out,
        items=_items(plan.memory_bytes if plan else {}, attempt.predicted_bytes or 0),
        measured_bytes=attempt.measured_bytes,
    )


def _needed(attempt: Attempt) -> str:
    return f"ran out of memory, needed {byte_size(attempt.needed_bytes)}"


def _of_plan(plan: PlanSummary) -> Rung:
    assert plan.strategy is not None
    return Rung(
        strategy=plan.strategy,
        verdict="chosen" if plan.fits else "comes closest, nothing fits",
        reason=plan.reason,
        fits=plan.fits,
        chosen=plan.fits,
        items=_items(plan.memory_bytes, plan.peak_bytes or 0),
    )


def _items(by_name: Mapping[str, int], total: int) -> tuple[tuple[str, int], ...]:
    if not by_name:
        return ((TOGETHER, total),)
    shown = [(title, by_name.get(name, 0)) for name, title in ITEMS.items()]
    others = sum(size for name, size in by_name.items() if name not in ITEMS)
    return tuple((title, size) for title, size in [*shown, (OTHERS, others)] if size)
