"""The ladder of one trial: what each memory technique would take of a rank, and why the cheaper ones failed.

A rung is a technique: those that were passed over, those that were tried and ran out of memory, and the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.memory.rungs import OTHERS, TOGETHER, Rung, last_plan, passed_over, rungs
from dashboards.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    drawing,
    empty,
    legend_below,
    text,
)
from dashboards.names import trial_name
from dashboards.rows import find
from dashboards.units import byte_size
from trials.study_record import StudyRecord

LOOKS = {
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
ROW_HEIGHT, MARGINS = 44, 290
"""Pixels of a rung, and above and below all of them, where a phone has the legend in many lines."""
BAR = 0.42
"""Thickness of a bar as a share of its row; its label stands above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderInfo:
    """What the figure shows; plain data, which `dataclasses.asdict` makes JSON of."""

    trial: int
    name: str
    """The model in short."""
    hbm_bytes: int | None
    """Memory of a rank; None where the record knows no cluster."""
    margin_bytes: int
    """Bytes that were added to every predicted peak for the verdict; below 0 they were taken off."""
    rungs: tuple[Rung, ...]
    """From the technique that joins fewest, the chosen one last; none where the trial was not planned."""
    left_out: int
    """Number of further strategies that were passed over: other numbers of micro-batches, most of them."""


def ladder_info(record: StudyRecord, trial_number: int | None = None) -> LadderInfo | None:
    """What the figure shows of a trial, or of the one that tells most: see `telling_trial`.

    Returns:
        None where the study has no such trial.
    """
    number = telling_trial(record) if trial_number is None else trial_number
    trial = find(record, number)
    if trial is None:
        return None
    plan = last_plan(trial)
    found = tuple(rungs(trial, plan)) if plan is not None else ()
    return LadderInfo(
        trial=trial.number,
        name=trial_name(trial),
        hbm_bytes=record.cluster.hbm if record.cluster else None,
        margin_bytes=plan.margin_bytes if plan else 0,
        rungs=found,
        left_out=passed_over(trial) - sum(not rung.chosen for rung in found),
    )


def telling_trial(record: StudyRecord) -> int | None:
    """The number of the trial whose ladder tells most: the first of best, winners and front that passed over a
    technique; else the candidate that passed over most; else the best."""
    winners = [winner.trial for winner in record.choice.winners] if record.choice else []
    asked = [*([record.best] if record.best is not None else []), *winners, *reversed(record.front)]
    selected = [trial for number in asked if (trial := find(record, number)) is not None]
    telling = next((trial for trial in selected if passed_over(trial)), None)
    most = max(record.candidates, key=passed_over, default=None)
    if telling is None and most is not None and passed_over(most):
        telling = most
    planned = (trial for trial in (*selected, *record.trials) if last_plan(trial) is not None)
    telling = telling or next(planned, None)
    return telling.number if telling else record.best


def ladder_figure(info: LadderInfo | None) -> go.Figure:
    """A bar per technique, stacked by what takes the memory, against the memory of a rank."""
    if info is None:
        return empty("Shown as soon as a trial has been planned.", title="The ladder of memory techniques")
    if not info.rungs:
        reason = "The trial was not planned for a cluster: nothing is known of its memory."
        return empty(reason, title=f"The ladder of trial {info.trial}")
    figure = drawing(
        _bars(info),
        title=_title(info),
        subtitle=f"Trial {info.trial}, {info.name}: predicted peak memory of the fullest rank by what takes it, "
        f"for each way to hold the model, those that join fewest techniques on top. {_further(info)}",
        height=MARGINS + ROW_HEIGHT * len(info.rungs),
    )
    names = [rung.strategy for rung in info.rungs]
    figure.update_layout(barmode="stack", margin_l=16)
    rows = [len(names) - 0.5, -0.8]  # room for the label of the first
    figure.update_yaxes(
        range=rows, categoryorder="array", categoryarray=names, showticklabels=False, showgrid=False
    )
    unit, scale = _unit(info)
    limit = [info.hbm_bytes] if info.hbm_bytes is not None and _near(info) else []
    widest = max([*(rung.total for rung in info.rungs), *limit])
    figure.update_xaxes(title_text=f"{unit} per rank", range=[0, 1.04 * widest / scale])
    _draw_limit(figure, info, scale)
    for index, rung in enumerate(info.rungs):
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


def _bars(info: LadderInfo) -> list[go.Bar]:
    scale = _unit(info)[1]
    traces = []
    for title, (color, pattern) in LOOKS.items():
        rungs = [(rung, dict(rung.items).get(title, 0)) for rung in info.rungs]
        if not any(size for _, size in rungs):
            continue
        traces.append(
            go.Bar(
                y=[rung.strategy for rung, _ in rungs],
                x=[size / scale for _, size in rungs],
                name=title,
                orientation="h",
                width=BAR,
                marker={
                    "color": color,
                    "opacity": [1.0 if rung.chosen else 0.7 for rung, _ in rungs],
                    "line": {"width": [1.5 if rung.chosen else 0.0 for rung, _ in rungs], "color": INK},
                    "pattern": {"shape": pattern, "size": 6, "solidity": 0.25},
                },
                hovertext=[
                    text(
                        f"{rung.strategy}: {rung.verdict}",
                        f"{title} {byte_size(size)} of {byte_size(rung.total)}",
                        rung.reason,
                    )
                    for rung, size in rungs
                ],
                hoverinfo="text",
            )
        )
    return traces


def _draw_limit(figure: go.Figure, info: LadderInfo, scale: float) -> None:
    """The memory of a rank as a line, unless all bars are far below it; and what the margin leaves of it."""
    if info.hbm_bytes is None or not _near(info):
        return
    widest = max(rung.total for rung in info.rungs)
    lines = [(info.hbm_bytes, f"memory of a rank {byte_size(info.hbm_bytes)}", "solid")]
    if info.margin_bytes:
        words = f"with the margin of {byte_size(info.margin_bytes)}"
        lines.append((info.hbm_bytes - info.margin_bytes, words, "dash"))
    for index, (size, label, dash) in enumerate(lines):
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


def _near(info: LadderInfo) -> bool:
    """Whether the memory of a rank is in sight of the widest bar."""
    widest = max(rung.total for rung in info.rungs)
    return info.hbm_bytes is not None and info.hbm_bytes <= 4 * widest


def _unit(info: LadderInfo) -> tuple[str, float]:
    largest = max([rung.total for rung in info.rungs] + [1])
    units = (("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30))
    return next((unit for unit in reversed(units) if largest >= unit[1]), units[0])


def _title(info: LadderInfo) -> str:
    last = info.rungs[-1]
    failed = sum(not rung.fits for rung in info.rungs[:-1])
    if not last.chosen:
        return "No memory technique fits this model"
    if len(info.rungs) == 1:
        return f"{last.strategy} is enough: no technique is needed that it does not have"
    if not failed:
        return f"{last.strategy} is the fastest of those that fit with as few techniques"
    others = "another way" if failed == 1 else f"{failed} other ways"
    do_not = "does not" if failed == 1 else "do not"
    return (
        f"{last.strategy} is the least that fits: {others} to hold the model with no more techniques {do_not}"
    )


def _further(info: LadderInfo) -> str:
    """How many strategies the plan passed over that are not drawn, and the memory of a rank out of sight."""
    words = []
    if info.left_out > 0:
        words.append(f"{info.left_out} more, most with other numbers of micro-batches, were passed over.")
    if info.hbm_bytes is not None and not _near(info):
        words.append(f"The memory of a rank, {byte_size(info.hbm_bytes)}, is far to the right of this frame.")
    return " ".join(words)
