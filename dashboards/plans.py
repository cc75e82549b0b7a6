"""How candidates were held in memory: plans, attempts, and what was predicted against what was measured.

An error is measured over predicted less one, in percent: above 0 it took more than was predicted. Attempts count
that ran on what they were planned for; a peak counts only if it was counted (`Attempt.measured_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from dashboards.names import IN_WORDS, MISSING, byte_size, known
from dashboards.rows import PlainTable
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Attempt, Outcome, PlanSummary, RejectedStrategy, TrialRecord

ALL = "all"
"""Name of the row for all techniques together."""
ITEMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "embedding_shards": "embedding tables",
    "unsharded_layer": "gathered parameters",
    "communication_buffers": "communication buffers",
    "input_batch": "input batch",
    "context": "context",
    "reserve": "allocator reserve",
}
"""Items of a predicted peak in words, in the order of a bar."""
MOST_REASONS, MOST_BARS = 4, 7
"""Largest numbers of ways to hold the model of which a row says what they lack, and that have a bar each."""
PLAIN_DP = "dp"


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one quantity; None if nothing is known."""

    count: int
    """Number of attempts in which the quantity was predicted and measured."""
    median: float | None
    """Median of the errors without their signs."""
    worst: float | None
    """The error farthest from 0, with its sign."""


class AccuracyRow(NamedTuple):
    """Errors of one technique."""

    technique: str
    """The technique as executed, or `all`."""
    attempts: int
    """Number of trainings, also of those without numbers to compare."""
    out_of_memory: int
    peak: Errors
    step: Errors


def accuracy(record: StudyRecord) -> tuple[AccuracyRow, ...]:
    """A row for each technique that was executed, those with most attempts first, then one for all.

    There is no row if nothing was trained.
    """
    attempts = [attempt for trial in record.trials for attempt in trial.attempts]
    by_technique: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_technique.setdefault(attempt.unsized_strategy, []).append(attempt)
    groups = sorted(by_technique.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        AccuracyRow(
            technique=name,
            attempts=len(group),
            out_of_memory=sum(attempt.outcome is Outcome.OUT_OF_MEMORY for attempt in group),
            peak=_errors((attempt.predicted_bytes, attempt.measured_bytes) for attempt in group),
            step=_errors((each.predicted_step_seconds, each.measured_step_seconds) for each in group),
        )
        for name, group in (*groups, (ALL, attempts))
        if group
    )


def _errors(pairs: Iterable[tuple[float | None, float | None]]) -> Errors:
    off = [
        100.0 * (measured / predicted - 1.0)
        for predicted, measured in pairs
        if predicted and measured and known(predicted) and known(measured)
    ]
    return Errors(len(off), median(map(abs, off)), max(off, key=abs)) if off else Errors(0, None, None)


def overall_accuracy(record: StudyRecord) -> AccuracyRow | None:
    """The row for all techniques together; None if nothing was trained."""
    return next((row for row in accuracy(record) if row.technique == ALL), None)


def accuracy_table(record: StudyRecord) -> PlainTable:
    """`accuracy` as the page and the terminal show it."""
    rows = []
    for row in accuracy(record):
        errors = [
            (str(each.count or ""), share(each.median), signed(each.worst)) for each in (row.peak, row.step)
        ]
        rows.append((row.technique, str(row.attempts), str(row.out_of_memory or ""), *errors[0], *errors[1]))
    columns = (
        *("Technique", "Attempts", "Out of memory"),
        *("Peaks compared", "Peak off, median", "Peak off, worst"),
        *("Steps compared", "Step off, median", "Step off, worst"),
    )
    return PlainTable(columns, rows, left=columns[:1])


def share(value: float | None) -> str:
    """An error without its sign: `2.1 %`."""
    return signed(value).lstrip("+")


def signed(value: float | None) -> str:
    """An error with its sign: `+2.1 %`."""
    return f"{value:+,.{1 if abs(value) < 100 else 0}f} %" if value is not None else MISSING


def attempts_table(record: StudyRecord) -> PlainTable:
    """How each planned trial was held: the plan, why nothing less would do, what was tried, predicted and measured
    peaks. There is no row if plain DP did for all at the first attempt."""
    plans = [(trial, trial.first_plan) for trial in record.trials if trial.first_plan is not None]
    worth_telling = any(
        plan.strategy != PLAIN_DP or len(trial.attempts) > 1 or plan.forced or bool(plan.other_shapes)
        for trial, plan in plans
    )
    rows: list[tuple[str, ...]] = []
    for trial, plan in plans if worth_telling else ():
        # name the shape if plans or attempts of the trial have had more than one
        shapes = {attempt.plan.ranks for attempt in trial.attempts if attempt.plan is not None}
        several = bool(plan.other_shapes) or len(shapes) > 1
        # what each way to hold the model lacks that has no more techniques than the plan's, those nearest first
        least: dict[str, int] = {}
        for each in sorted(plan.rejected, key=lambda strategy: strategy.lacking_bytes):
            if each.lacking_bytes:
                least.setdefault(each.held_as, each.lacking_bytes)
        lacks = [f"{way} lacks {byte_size(count)}" for way, count in least.items()]
        if len(lacks) > MOST_REASONS:
            lacks[MOST_REASONS:] = [f"{len(lacks) - MOST_REASONS} more lack more"]
        tried, last = [], None
        for last in trial.attempts:
            happened = "; ".join(filter(None, (last.replaced, last.slow_rank)))
            if last.outcome is Outcome.OUT_OF_MEMORY and last.needed_bytes and last.limit_bytes:
                happened = f"{byte_size(last.needed_bytes)} of {byte_size(last.limit_bytes)}"
            ended = IN_WORDS[last.outcome] + (f" ({happened})" if happened else "")
            tried.append(f"{last.strategy}{_on_ranks(last.plan, several)}: {ended}")
        row = (
            str(trial.number),
            f"{plan.strategy or ''}{_on_ranks(plan, several)}" if plan.fits else "nothing fits",
            " ".join(filter(None, (*plan.other_shapes, ", ".join(lacks)))),
            "; then ".join(tried),
            (last.executed if last else None) or "",
            byte_size(last.predicted_bytes if last else plan.peak_bytes),
            byte_size(last.measured_bytes if last else None),
        )
        rows.append(row)
    columns = ("Trial", "Planned", "Why nothing less", "Tried", "Executed", "Predicted peak", "Measured peak")
    return PlainTable(columns, rows, left=columns[1:5])


def _on_ranks(plan: PlanSummary | None, several: bool) -> str:
    return f" on {plan.ranks}" if several and plan is not None and plan.ranks is not None else ""


def nearest_of_each_way(plan: PlanSummary) -> list[RejectedStrategy]:
    """Of the rejected strategies the one that lacks least for each way to hold the model, in the plan's order."""
    nearest: dict[str, RejectedStrategy] = {}
    for each in plan.rejected:
        if each.held_as not in nearest or each.lacking_bytes < nearest[each.held_as].lacking_bytes:
            nearest[each.held_as] = each
    return list(nearest.values())


def held(trial: TrialRecord) -> dict[str, Any] | None:
    """How a candidate is held, as the page's script reads it: a bar for each technique of its plan, those of
    cheaper ones first, and what the plan says besides; None without a plan."""
    plan = trial.plan.summary
    if plan is None:
        return None
    ways = nearest_of_each_way(plan)
    nearest = sorted(ways, key=lambda strategy: strategy.lacking_bytes)[:MOST_BARS]
    shown = {strategy.strategy for strategy in nearest}
    left = [strategy.lacking_bytes for strategy in ways if strategy.strategy not in shown]
    ran_out = []
    for attempt in trial.attempts:
        if attempt.outcome is Outcome.OUT_OF_MEMORY:
            needed, limit, predicted = attempt.needed_bytes, attempt.limit_bytes, attempt.predicted_bytes
            sizes = f": a rank needed {byte_size(needed)} of {byte_size(limit)}" if needed and limit else ""
            planned = f" (predicted: {byte_size(predicted)})" if predicted else ""
            bar = {
                "name": attempt.strategy,
                "bytes": needed or predicted or 0,
                "lacking": max(0, needed - limit) if needed and limit else 0,
                "why": f"tried, ran out of memory{sizes}{planned}",
                "state": "ran out",
            }
            ran_out.append(bar)
    tried = {bar["name"] for bar in ran_out}
    bars: list[dict[str, Any]] = []
    for rejected in plan.rejected:
        if rejected.strategy in shown - tried:
            lacking = rejected.lacking_bytes
            bar = {
                "name": rejected.strategy,
                "bytes": rejected.memory_bytes,
                "lacking": lacking,
                "why": f"lacks {byte_size(lacking)}" if lacking else "fits, but its step takes longer",
                "state": "rejected",
            }
            bars.append(bar)
    bars += ran_out
    if plan.strategy is not None and plan.peak_bytes is not None and plan.strategy not in tried:
        ordered = dict.fromkeys([*ITEMS, *plan.memory_bytes])
        items = [(ITEMS.get(item, item.replace("_", " ")), plan.memory_bytes.get(item)) for item in ordered]
        bar = {
            "name": plan.strategy,
            "bytes": plan.peak_bytes,
            "why": "chosen: the least that fits" if plan.fits else "lacks least, and does not fit",
            "state": "chosen" if plan.fits else "rejected",
            "lacking": 0,
            "items": [(words, size) for words, size in items if size],
            "at": plan.peak_at,
        }
        bars.append(bar)
    return {
        "bars": bars,
        "more": f"{len(left)} more lack {byte_size(min(left))} to {byte_size(max(left))}." if left else None,
        "reason": plan.reason,
        "remedy": plan.remedy,
        "faster": plan.faster,
        "notes": [*plan.other_shapes, *plan.notes],
        "margin": plan.margin_bytes,
        "fits": plan.fits,
        "hostBytes": plan.host_bytes,
    }
