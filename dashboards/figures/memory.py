"""Memory of candidates: the ladder of one trial's techniques, and how far plans were from measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log10
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREEN,
    GREY,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    drawing,
    empty,
    in_order,
    legend_below,
    looks,
    study_techniques,
    text,
)
from dashboards.names import byte_size, known, milliseconds, trial_name
from dashboards.plans import ITEMS, nearest_of_each_way, overall_accuracy, share, signed
from dashboards.rows import find, winner_reasons
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Outcome, PlanSummary, TrialRecord

OTHERS, TOGETHER = "all else", "not itemised"
"""What further items are called together, and a peak of whose items the record knows nothing."""
ITEM_LOOKS = {
    "parameters": (BLUE, ""),
    "gradients": (SKY, "/"),
    "optimizer state": (PURPLE, ""),
    "activations": (ORANGE, ""),
    "embedding tables": (GREEN, "\\"),
    "gathered parameters": (YELLOW, "x"),
    "communication buffers": (VERMILION, "."),
    OTHERS: (GREY, ""),
    TOGETHER: (GREY, "-"),
}
"""Colour and pattern of each item of a peak."""
UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
MOST_RUNGS = 14
ROW_HEIGHT, LADDER_MARGINS = 44, 290
"""Heights in pixels: of a rung, and of the margins, in which a phone breaks the legend into many lines."""
BAR = 0.42
"""Thickness of a bar as a share of its row; its label stands above it."""
PANEL_HEIGHT, PANEL_MARGINS = 330, 200
MIB, MS = 2.0**20, 1e3
ROOM = 1.15
"""Room beyond the lowest and the highest value, as a factor on the logarithmic axes."""


class Rung(NamedTuple):
    """One technique of a trial's ladder."""

    strategy: str
    verdict: str
    """In a few words: `lacks 1.2 MiB`, `ran out of memory`, `fits, slower`, `chosen`."""
    reason: str
    """Why, in a sentence; empty if the record does not tell."""
    fits: bool
    chosen: bool
    items: Mapping[str, int]
    """Predicted bytes by item of `ITEM_LOOKS`."""

    @property
    def total(self) -> int:
        """The predicted peak."""
        return sum(self.items.values())


def ladder_figure(record: StudyRecord, trial_number: int | None = None) -> go.Figure:
    """What each memory technique would take of a rank for a trial, and why the cheaper ones failed: a bar per
    technique, stacked by what takes the memory, against the memory of a rank.

    Without a number it is the trial that tells most (`telling_trial`).
    """
    trial = find(record, telling_trial(record) if trial_number is None else trial_number)
    if trial is None:
        return empty("Shown as soon as a trial has been planned.", title="The ladder of memory techniques")
    plan = _last_plan(trial)
    rungs = list(_rungs(trial, plan)) if plan is not None else []
    if plan is None or not rungs:
        reason = "The trial was not planned for a cluster: nothing is known of its memory."
        return empty(reason, title=f"The ladder of trial {trial.number}")
    widest = max(rung.total for rung in rungs)
    unit, scale = next((unit for unit in UNITS if widest >= unit[1]), UNITS[-1])
    hbm = record.cluster.hbm if record.cluster else None
    in_sight = hbm is not None and hbm <= 4 * widest
    further = []
    left_out = _passed_over(trial) - sum(not rung.chosen for rung in rungs)
    if left_out > 0:
        further.append(f"{left_out} more, most with other numbers of micro-batches, were passed over.")
    if hbm is not None and not in_sight:
        further.append(f"The memory of a rank, {byte_size(hbm)}, is far to the right of this frame.")
    traces = []
    for item, (color, pattern) in ITEM_LOOKS.items():
        sizes = [rung.items.get(item, 0) for rung in rungs]
        if not any(sizes):
            continue
        trace = go.Bar(
            y=[rung.strategy for rung in rungs],
            x=[size / scale for size in sizes],
            name=item,
            orientation="h",
            width=BAR,
            marker={
                "color": color,
                "opacity": [1.0 if rung.chosen else 0.7 for rung in rungs],
                "line": {"width": [1.5 if rung.chosen else 0.0 for rung in rungs], "color": INK},
                "pattern": {"shape": pattern, "size": 6, "solidity": 0.25},
            },
            hovertext=[
                text(
                    f"{rung.strategy}: {rung.verdict}",
                    f"{item} {byte_size(size)} of {byte_size(rung.total)}",
                    rung.reason,
                )
                for rung, size in zip(rungs, sizes, strict=True)
            ],
            hoverinfo="text",
        )
        traces.append(trace)
    last, failed = rungs[-1].strategy, sum(not rung.fits for rung in rungs[:-1])
    title = f"{last} is the fastest of those that fit with as few techniques"
    if not rungs[-1].chosen:
        title = "No memory technique fits this model"
    elif len(rungs) == 1:
        title = f"{last} is enough: no technique is needed that it does not have"
    elif failed:
        others, do_not = ("another way", "does not") if failed == 1 else (f"{failed} other ways", "do not")
        title = f"{last} is the least that fits: {others} to hold the model with no more techniques {do_not}"
    figure = drawing(
        traces,
        title=title,
        subtitle=f"Trial {trial.number}, {trial_name(trial)}: predicted peak memory of the fullest rank by what "
        "takes it, for each way to hold the model, those that join fewest techniques on top. "
        f"{' '.join(further)}",
        height=LADDER_MARGINS + ROW_HEIGHT * len(rungs),
    )
    figure.update_layout(barmode="stack", margin_l=16)
    figure.update_yaxes(
        range=[len(rungs) - 0.5, -0.8],  # room for the label of the first
        categoryorder="array",
        categoryarray=[rung.strategy for rung in rungs],
        showticklabels=False,
        showgrid=False,
    )
    limits = []
    if hbm is not None and in_sight:
        limits.append((hbm, f"memory of a rank {byte_size(hbm)}", "solid"))
        if plan.margin_bytes:
            words = f"with the margin of {byte_size(plan.margin_bytes)}"
            limits.append((hbm - plan.margin_bytes, words, "dash"))
    end = max(widest, hbm) if hbm is not None and in_sight else widest
    figure.update_xaxes(title_text=f"{unit} per rank", range=[0, 1.04 * end / scale])
    for index, (size, label, dash) in enumerate(limits):
        figure.add_vline(size / scale, line={"color": VERMILION, "width": 2, "dash": dash})
        figure.add_annotation(
            text=label,
            x=size / scale,
            y=1,
            yref="paper",
            yanchor="bottom",
            yshift=16 * index,
            xanchor="left" if size < widest / 2 else "right",
            showarrow=False,
        )
    for index, rung in enumerate(rungs):
        figure.add_annotation(
            x=0,
            y=index - BAR / 2,
            text=text(f"{rung.strategy}: {byte_size(rung.total)}, {rung.verdict}"),
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"weight": "bold" if rung.chosen else "normal"},
        )
    return legend_below(figure)


def telling_trial(record: StudyRecord) -> int | None:
    """The number of the trial whose ladder tells most: the first of best, winners and front that passed over a
    technique; else the candidate that passed over most; else the best."""
    asked = (record.best, *winner_reasons(record), *reversed(record.front))
    selected = [trial for number in asked if (trial := find(record, number)) is not None]
    telling = next((trial for trial in selected if _passed_over(trial)), None)
    most = max(record.candidates, key=_passed_over, default=None)
    if telling is None and most is not None and _passed_over(most):
        telling = most
    planned = (trial for trial in (*selected, *record.trials) if _last_plan(trial) is not None)
    telling = telling or next(planned, None)
    return telling.number if telling else record.best


def _last_plan(trial: TrialRecord) -> PlanSummary | None:
    """The plan that the trial came to, after those whose attempts ran out of memory."""
    return trial.plan.summary or trial.first_plan


def _passed_over(trial: TrialRecord) -> int:
    """Number of strategies that the trial's last plan passed over, and of attempts that ran out of memory."""
    plan = _last_plan(trial)
    ran_out = sum(attempt.outcome is Outcome.OUT_OF_MEMORY for attempt in trial.attempts)
    return (len(plan.rejected) if plan else 0) + ran_out


def _rungs(trial: TrialRecord, plan: PlanSummary) -> Iterator[Rung]:
    """Techniques passed over, those that join fewest first; those that were tried; the one it came to."""
    tried = {attempt.strategy for attempt in trial.attempts}
    # records of older versions have items of no rejected strategy
    itemised = [each for each in plan.rejected if each.items] or nearest_of_each_way(plan)
    rejected = {each.strategy: each for each in itemised if each.strategy not in tried}
    chosen_seconds = plan.whole_step_seconds
    for name in in_order(rejected)[:MOST_RUNGS]:
        each = rejected[name]
        fits, seconds = each.lacking_bytes == 0, each.step_seconds
        verdict = "fits, not chosen" if fits else f"lacks {byte_size(each.lacking_bytes)}"
        if fits and seconds is not None and chosen_seconds and seconds > chosen_seconds:
            verdict = f"fits, its step takes {seconds / chosen_seconds:.2f}x as long"
        items = _items(each.items, each.memory_bytes)
        yield Rung(name, verdict, each.reason, fits=fits, chosen=False, items=items)
    last = trial.attempts[-1] if trial.attempts and trial.attempts[-1].plan is not None else None
    for attempt in (*trial.attempts[:-1], *([last] if last else [])):
        ran_out = attempt.outcome is Outcome.OUT_OF_MEMORY
        verdict = "chosen" if attempt is last else "ran again"
        if ran_out:
            needed = attempt.needed_bytes
            verdict = "ran out of memory" + (f", needed {byte_size(needed)}" if needed is not None else "")
        elif attempt.measured_bytes:
            verdict += f", measured {byte_size(attempt.measured_bytes)}"
        yield Rung(
            strategy=attempt.strategy,
            verdict=verdict,
            reason=attempt.plan.reason if attempt.plan else "",
            fits=not ran_out,
            chosen=attempt is last and not ran_out,
            items=_items(attempt.plan.memory_bytes if attempt.plan else {}, attempt.predicted_bytes or 0),
        )
    if last is None and plan.strategy is not None:
        yield Rung(
            strategy=plan.strategy,
            verdict="chosen" if plan.fits else "comes closest, nothing fits",
            reason=plan.reason,
            fits=plan.fits,
            chosen=plan.fits,
            items=_items(plan.memory_bytes, plan.peak_bytes or 0),
        )


def _items(by_name: Mapping[str, int], total: int) -> dict[str, int]:
    if not by_name:
        return {TOGETHER: total}
    items = dict.fromkeys(ITEM_LOOKS, 0)
    for name, size in by_name.items():
        title = ITEMS.get(name, OTHERS)
        items[title if title in ITEM_LOOKS else OTHERS] += size
    return items


class Prediction(NamedTuple):
    """Predicted and measured bytes, or seconds of a step, of one attempt; of one that ran out of memory the bytes
    that it would have held at that moment."""

    trial: int
    technique: str
    predicted: float
    measured: float
    ran_out: bool


def predictions_figure(record: StudyRecord) -> go.Figure:
    """Predicted against measured on logarithmic axes, a point per attempt that ran on what it was planned for: the
    peak memory of a rank above and the time of a step below; above the line it took more.

    `dashboards.plans.accuracy` has the errors as a table; a point is here if that table counts it.
    """
    title = "How far plans are from measurements"
    memory: list[Prediction] = []
    step: list[Prediction] = []
    for trial in record.trials:
        for attempt in trial.attempts:
            name, ran_out = attempt.unsized_strategy, attempt.outcome is Outcome.OUT_OF_MEMORY
            peak = attempt.needed_bytes if ran_out else attempt.measured_bytes
            for points, predicted, measured in (
                (memory, attempt.predicted_bytes, peak),
                (step, attempt.predicted_step_seconds, attempt.measured_step_seconds),
            ):
                if predicted and measured and known(predicted) and known(measured):
                    points.append(Prediction(trial.number, name, predicted, measured, ran_out))
    if not memory and not step:
        reason = "Shown as soon as an attempt has ended that ran on the cluster that it was planned for."
        return empty(reason, title=title)
    used = {point.technique for point in (*memory, *step)}
    shown = {name: look for name, look in looks(study_techniques(record)).items() if name in used}
    panels = [
        panel
        for panel in (
            ("MiB of memory per rank", memory, 1 / MIB, byte_size),
            ("milliseconds per step", step, MS, lambda seconds: milliseconds(MS * seconds)),
        )
        if panel[1]
    ]
    traces: list[go.Scatter] = []
    axes: dict[str, object] = {}
    for index, (unit, points, scale, words) in enumerate(panels):
        suffix = "" if index == 0 else "2"
        values = [value for point in points for value in (point.predicted, point.measured)]
        ends = [min(values) / ROOM * scale, max(values) * ROOM * scale]
        place = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": not suffix}
        line = {"color": GREY, "width": 1.5, "dash": "dash"}
        traces.append(
            go.Scatter(
                x=ends, y=ends, mode="lines", line=line, name="as predicted", hoverinfo="skip", **place
            )
        )
        for technique, look in shown.items():
            own = sorted(
                (point for point in points if point.technique == technique), key=lambda point: point.ran_out
            )
            trace = go.Scatter(
                x=[point.predicted * scale for point in own],
                y=[point.measured * scale for point in own],
                mode="markers",
                name=text(technique),
                legendgroup=technique,
                customdata=[point.trial for point in own],
                marker={
                    "color": look.color,
                    "size": 11,
                    "symbol": [f"{look.symbol}-open" if point.ran_out else look.symbol for point in own],
                    "line": {"color": INK, "width": 0.8},
                },
                hovertext=[
                    text(
                        f"trial {point.trial}, {technique}"
                        + (": ran out of memory" if point.ran_out else ""),
                        f"predicted {words(point.predicted)}, "
                        f"{'would have held' if point.ran_out else 'measured'} {words(point.measured)} "
                        f"({signed(100.0 * (point.measured / point.predicted - 1.0))})",
                    )
                    for point in own
                ],
                hoverinfo="text",
                **place,
            )
            traces.append(trace)
        log_range = [log10(end) for end in ends]
        style = {"type": "log", "range": log_range, "dtick": "D2", "tickformat": "~g", "gridcolor": GRID}
        domain = [0.0, 1.0] if len(panels) == 1 else [[0.58, 1.0], [0.0, 0.42]][index]
        axes[f"xaxis{suffix}"] = style | {"anchor": f"y{suffix}", "title": {"text": f"predicted {unit}"}}
        axes[f"yaxis{suffix}"] = style | {
            "domain": domain,
            "anchor": f"x{suffix}",
            "title": {"text": f"measured {unit}"},
            "zeroline": False,
        }
    overall = overall_accuracy(record)
    clauses = []
    if overall is not None and overall.peak.median is not None:
        peaks = sum(not point.ran_out for point in memory)
        clauses.append(f"{share(overall.peak.median)} in memory ({peaks} attempts)")
    if overall is not None and overall.step.median is not None:
        clauses.append(f"{share(overall.step.median)} in step time ({len(step)} attempts)")
    if clauses:
        title = f"Predictions are off by {' and '.join(clauses)}, in the median"
    subtitle = (
        "A point per training attempt, on the dashed line where both are equal, above it where more was needed "
        "than predicted; colour and shape: memory technique."
    )
    if any(point.ran_out for point in memory):
        subtitle += " Open: ran out of memory, shown with what it would have held."
    height = PANEL_MARGINS + PANEL_HEIGHT * len(panels)
    figure = legend_below(drawing(traces, title=title, subtitle=subtitle, height=height))
    return figure.update_layout(axes)
