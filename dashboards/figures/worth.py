"""What parts and members of winners are worth, and on which rows winners are better: rows with intervals around a
line at 0.

Everywhere here NE is lower, and so better, to the left of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.figures.style import (
    BLUE,
    GREY,
    INK,
    VERMILION,
    drawing,
    empty,
    frame,
    legend_below,
    text,
)
from dashboards.names import counted_from_one, decimals, percent, percent_range, ratio, si, trial_name
from dashboards.rows import baseline_ne, find, known_ne, relative_percent, winner_reasons
from trials.records.findings import MeanInterval, WinnerVerdict
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import TrialKind, TrialRecord

ROW_HEIGHT, MARGINS = 24, 210
"""Pixels of a row, and above and below all of them."""
MARGIN = 0.05
"""Room left at either end of the axis, as a share of the range."""
VERDICT_LOOKS = {
    WinnerVerdict.YES: ("circle", BLUE),
    WinnerVerdict.NO: ("square", VERMILION),
    WinnerVerdict.CANNOT_TELL: ("circle-open", GREY),
}
MOST_AVERAGES = 8
"""Largest number of averages that are drawn: those on the front and the winners come first."""
AVERAGE_HEIGHT, AVERAGE_MARGINS = 46, 200


class Estimate(NamedTuple):
    """One row."""

    label: str
    percent: float
    """Change of NE in percent; negative is better."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval; None if there is none."""
    better: WinnerVerdict
    """Whether NE is lower, beyond doubt."""
    hover: tuple[str, ...] = ()
    """Further lines of the hover box."""


def judged(low: float | None, high: float | None) -> WinnerVerdict:
    """Whether an interval lies on one side of 0."""
    if low is None or high is None:
        return WinnerVerdict.CANNOT_TELL
    return WinnerVerdict.YES if high < 0 else WinnerVerdict.NO if low > 0 else WinnerVerdict.CANNOT_TELL


def brought(without: MeanInterval, label: str, hover: str) -> Estimate:
    """What a part brings, from the change of NE without it."""
    low = -without.high if without.high is not None else None
    high = -without.low if without.low is not None else None
    return Estimate(label, -without.mean, low, high, judged(low, high), (hover,))


def estimates_figure(
    rows: Sequence[Estimate],
    *,
    title: str,
    subtitle: str,
    axis: str,
    words: tuple[str, str, str],
    more: Sequence[go.Scatter] = (),
) -> go.Figure:
    """The figure.

    Args:
        rows: from top to bottom; labels are different.
        title: what is seen.
        subtitle: how to read it.
        axis: what the numbers are.
        words: the legend's names of rows that are better, worse, and undecided.
        more: further traces over the same rows.
    """
    traces = []
    for name, (verdict, look) in zip(words, VERDICT_LOOKS.items(), strict=True):
        alike = [row for row in rows if row.better is verdict]
        traces += [interval_trace(alike, name, *look)] if alike else []
    # a few wide intervals must not press the others flat
    intervals = [
        (row.percent, row.low, row.high) for row in rows if row.low is not None and row.high is not None
    ]
    widths = [max(high - middle, middle - low) for middle, low, high in intervals]
    usual = frame(widths).high if widths else 0.0
    shown = [0.0, *(row.percent for row in rows)]
    for middle, low, high in intervals:
        shown += [max(low, middle - usual), min(high, middle + usual)]
    margin = MARGIN * (max(shown) - min(shown)) or 1.0
    first, last = min(shown) - margin, max(shown) + margin
    beyond = sum(low < first or high > last for _, low, high in intervals)
    if beyond:
        subtitle += f" {beyond} of these intervals go beyond the frame; a double click shows all."
    height = MARGINS + ROW_HEIGHT * len(rows)
    figure = drawing([*traces, *more], title=title, subtitle=subtitle, height=height)
    labels = [row.label for row in rows]
    figure.update_yaxes(
        autorange="reversed",
        categoryorder="array",
        categoryarray=labels,
        automargin=True,
        tickmode="array",
        tickvals=labels,
        ticktext=[text(label) for label in labels],
        range=[len(rows) - 0.5, -0.5],
    )
    figure.update_xaxes(title_text=axis, ticksuffix=" %", range=(first, last))
    figure.add_vline(0, line={"color": GREY, "width": 1.5}, layer="below")
    return legend_below(figure)


def interval_trace(rows: Sequence[Estimate], name: str, symbol: str, color: str) -> go.Scatter:
    """Points with their intervals, on the rows of the same labels."""
    hovers = []
    for row in rows:
        between = f" (95 % interval {percent_range(row.low, row.high)})" if row.low is not None else ""
        hovers.append(text(row.label, f"{percent(row.percent)} NE{between}", *row.hover))
    return go.Scatter(
        x=[row.percent for row in rows],
        y=[row.label for row in rows],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.high - row.percent if row.high is not None else 0.0 for row in rows],
            "arrayminus": [row.percent - row.low if row.low is not None else 0.0 for row in rows],
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": 9},
        hovertext=hovers,
        hoverinfo="text",
    )


def ablations_figure(record: StudyRecord) -> go.Figure:
    """What a network's modules and layers bring, or an average's members (`dhen-search ablate`): a row per part of
    each winner, by all ablations that the study's ledger has; left of 0 it lowers NE."""
    rows, about, sure = [], [], []
    for ablation in record.ablations:
        trial = find(record, ablation.trial)
        name = trial_name(trial) if trial is not None else "a trial that the study no longer has"
        about.append(f"trial {ablation.trial}: {name}, {len(ablation.seeds)} seeds, on {ablation.split}")
        whole = f"trial {ablation.trial}: " if len(record.ablations) > 1 else ""
        for part in ablation.parts:
            if part.ne_percent is None:
                continue
            removed = counted_from_one(part.removed)
            row = brought(
                part.ne_percent,
                f"{whole}{removed} ({decimals(part.flops_percent, 0)} % of FLOPs)",
                f"without it NE is {percent(part.ne_percent.mean)} and FLOPs are {si(part.flops)}",
            )
            rows.append(row)
            if row.high is not None and row.high < 0:
                sure.append((row.percent, f"{removed} of trial {ablation.trial}"))
    if not rows:
        command = f"dhen-search ablate {record.directory}"
        reason = f"Shown once `{command}` has retrained a winner without each of its parts."
        return empty(reason, title="What the parts of winners bring")
    title = "No part of a winner surely lowers NE"
    if sure:
        most, part_name = min(sure, key=lambda pair: pair[0])
        title = f"{part_name} brings most: {percent(most)} NE"
    return estimates_figure(
        rows,
        title=title,
        subtitle="Each part is removed in turn and the rest is trained again; of an average each member is "
        f"left out. 95 % intervals. {'; '.join(about)}.",
        axis="change of NE with the part, against without it (left is better)",
        words=("lowers NE", "raises NE", "cannot tell"),
    )


def slices_figure(record: StudyRecord) -> go.Figure:
    """Winners against the study's baseline of today by the values of columns (`dhen-search slices`): a row per
    slice; left of 0 the winner has the lower NE."""
    shown = [
        (trial, sliced)
        for sliced in record.slices
        if (trial := find(record, sliced.trial)) is not None and sliced.baseline == record.baseline
    ]
    several = len({trial.number for trial, _ in shown}) > 1
    rows, undecided = [], 0
    for trial, sliced in shown:
        winner = f"trial {trial.number}: " if several else ""
        for each in sliced.slices:
            if each.difference_percent is None:  # its rows lie in one block, or its labels are all equal
                undecided += 1
                continue
            row = Estimate(
                label=f"{winner}{sliced.column} {each.value} ({each.rows:,} rows)",
                percent=each.difference_percent,
                low=each.low_percent,
                high=each.high_percent,
                better=each.better,
                hover=(
                    f"NE {decimals(each.ne, 5)}, the baseline's {decimals(each.baseline_ne, 5)}",
                    f"calibration {decimals(each.calibration, 3)} ({decimals(each.baseline_calibration, 3)})",
                    f"{decimals(100 * each.base_rate, 2)} % positive",
                ),
            )
            rows.append(row)
    if not rows:
        reason = (
            f"Shown once `dhen-search slices {record.directory} --column NAME` has compared a winner "
            "with the baseline by the values of a column."
        )
        return empty(reason, title="Where winners are better than the baseline")
    blocks = ", ".join(sorted({sliced.blocked_by or "order" for _, sliced in shown}))
    winners = "; ".join(dict.fromkeys(f"trial {trial.number}: {trial_name(trial)}" for trial, _ in shown))
    subtitle = (
        f"NE on test relative to the baseline's, by the values of columns, over {len(shown[0][1].seeds)} seeds; "
        f"95 % intervals over seeds and blocks of rows by {blocks}, verdicts after Holm's correction over the "
        f"slices of a column. {winners}."
    )
    if undecided:
        subtitle += f" {undecided} more slices have too few rows for an interval."
    better = sum(row.better is WinnerVerdict.YES for row in rows)
    worse = sum(row.better is WinnerVerdict.NO for row in rows)
    return estimates_figure(
        rows,
        title=f"Better than the baseline on {better} of {len(rows)} slices, worse on {worse}, for sure",
        subtitle=subtitle,
        axis="NE on test against the baseline (left is better)",
        words=("better than the baseline", "worse than the baseline", "cannot tell"),
    )


def averages_figure(record: StudyRecord) -> go.Figure | None:
    """What averaging brings, and what it costs: a row per average in order of FLOPs, its members as circles, the
    average as a triangle. None if the study has no average."""
    if not record.averages:
        return None
    base = baseline_ne(record)

    def x(trial: TrialRecord) -> float:
        """NE relative to the baseline in percent, or NE if there is no baseline."""
        ne = known_ne(trial)
        assert ne is not None
        return ne if base is None else relative_ne_percent(ne, base)

    def against(trial: TrialRecord) -> str:
        ne = known_ne(trial)
        return f"NE {decimals(ne, 5)} ({percent(relative_percent(ne, base))} to the baseline)"

    pairs = []
    for trial in record.averages:
        members = [member for member in record.networks(trial) if known_ne(member) is not None]
        if known_ne(trial) is not None and members:
            pairs.append((trial, sorted(members, key=x)))
    if not pairs:
        reason = "Shown as soon as the study has made an average of networks."
        return empty(reason, title="What averages bring over their members")
    first = sorted(pairs, key=lambda pair: pair[0].number not in {*record.front, *winner_reasons(record)})
    drawn = sorted(first[:MOST_AVERAGES], key=lambda pair: pair[0].job.flops or 0.0)
    labels = [
        f"trial {average.number}: {len(members)} networks, {si(average.job.flops)} FLOPs"
        for average, members in drawn
    ]
    spans: list[float | None] = []
    span_labels: list[str | None] = []
    each: list[tuple[str, TrialRecord, TrialRecord]] = []
    gains = []
    for label, (average, members) in zip(labels, drawn, strict=True):
        xs = [x(network) for network in (average, *members)]
        spans += [min(xs), max(xs), None]
        span_labels += [label, label, None]
        each += [(label, average, member) for member in members]
        gains.append(relative_ne_percent(known_ne(average) or 0.0, known_ne(members[0]) or 1.0))
    outline = {"color": INK, "width": 0.8}
    traces = [
        go.Scatter(
            x=spans,
            y=span_labels,
            mode="lines",
            line={"color": GREY, "width": 1},
            hoverinfo="skip",
            showlegend=False,
        ),
        go.Scatter(
            x=[x(member) for _, _, member in each],
            y=[label for label, _, _ in each],
            mode="markers+text",
            name="members",
            text=[str(member.number) for _, _, member in each],
            textposition="top center",
            customdata=[
                None if member.kind is TrialKind.RETRAINING else member.number for _, _, member in each
            ],
            marker={"color": GREY, "symbol": "circle", "size": 10, "line": outline},
            hovertext=[
                text(
                    f"{'retraining' if member.kind is TrialKind.RETRAINING else 'trial'} "
                    f"{member.number}, a member of trial {average.number}",
                    trial_name(member),
                    against(member),
                    f"{si(member.job.flops)} FLOPs",
                )
                for _, average, member in each
            ],
            hoverinfo="text",
        ),
        go.Scatter(
            x=[x(average) for average, _ in drawn],
            y=labels,
            mode="markers",
            name="average",
            customdata=[average.number for average, _ in drawn],
            marker={"color": BLUE, "symbol": "triangle-up", "size": 15, "line": outline},
            hovertext=[
                text(
                    f"trial {average.number}, the average"
                    + (": on the front" if average.number in record.front else ""),
                    against(average),
                    f"{percent(gain)} to its best member",
                    f"{si(average.job.flops)} FLOPs",
                )
                for (average, _), gain in zip(drawn, gains, strict=True)
            ],
            hoverinfo="text",
        ),
    ]
    (average, (member, *_)), gain = min(zip(drawn, gains, strict=True), key=lambda pair: x(pair[0][0]))
    flops, alone = average.job.flops, member.job.flops
    times = f" at {ratio(flops / alone)} its FLOPs" if flops and alone else ""
    subtitle = (
        "NE on validation of each average (triangle) and of the networks that it is the mean of (circles); left "
        "is better. What each member brings is told by `dhen-search ablate` of the average."
    )
    if len(pairs) > len(drawn):
        subtitle += f" {len(pairs) - len(drawn)} more averages are not on the front."
    figure = drawing(
        traces,
        title=f"The best average has {percent(gain)} NE to its best member, trial {member.number},{times}",
        subtitle=subtitle,
        height=AVERAGE_MARGINS + AVERAGE_HEIGHT * len(drawn),
    )
    figure.update_yaxes(
        categoryorder="array", categoryarray=labels, automargin=True, range=[len(labels) - 0.5, -0.5]
    )
    if base is not None:
        figure.update_xaxes(title_text="NE against the baseline (left is better)", ticksuffix=" %")
        line = {"color": VERMILION, "width": 1, "dash": "dot"}
        figure.add_vline(0, line=line, annotation_text="baseline", layer="below")
    else:
        figure.update_xaxes(title_text="NE on validation (left is better)")
    return legend_below(figure)
