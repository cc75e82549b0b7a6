"""Two studies on one page: both fronts, the best of each, settings that differ, and what cannot be compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from dashboards.figures.style import BLUE, VERMILION, drawing, empty, text
from dashboards.names import MISSING, byte_size, decimals, duration, known, percent, si, trial_name
from dashboards.report.answers import Command, facts, telling_comparison
from dashboards.report.page import environment, figure_data, packed_plotly, scripts
from dashboards.rows import TrialRow, baseline_ne, find, trial_rows
from dashboards.sentences.summary import progress
from dashboards.sentences.winners import interval
from trials.records.study_record import StudyRecord
from trials.records.trial_record import Metrics

SCRIPTS = ("elements.js", "units.js", "plotly.js", "figures.js", "copy.js", "compare.js")
COLORS = (BLUE, VERMILION)


def render_comparison(first: StudyRecord, second: StudyRecord) -> str:
    """Returns the page; all that comes from data is escaped, as in the report of one study."""
    records, names = (first, second), names_of(first, second)
    limits = not_comparable(first, second)
    return (
        environment()
        .get_template("comparison.html")
        .render(
            names=names,
            progress=[f"{progress(record)}, {duration(record.elapsed_seconds)}" for record in records],
            limits=limits,
            figure=figure_data("fronts", two_fronts_figure(records, names, relative=bool(limits))),
            best=best_rows(first, second),
            settings=different_settings(first, second),
            commands=[
                Command(f"The report of {name}", f"dhen-search report {shlex.quote(record.directory)} --open")
                for name, record in zip(names, records, strict=True)
            ],
            plotly=packed_plotly(),
            scripts=scripts(SCRIPTS),
        )
    )


def two_fronts_figure(records: Sequence[StudyRecord], names: Sequence[str], *, relative: bool) -> go.Figure:
    """The Pareto fronts of two studies, each in a colour and with a symbol of its own.

    With `relative`, NE is in percent of each study's own baseline, as it is if NE itself cannot be compared.
    """
    title = "Both fronts"
    traces = []
    for record, name, color, symbol in zip(records, names, COLORS, ("circle", "diamond"), strict=True):
        points = []
        for row in trial_rows(record, [trial for trial in record.trials if trial.number in record.front]):
            ne, flops = row.relative_percent if relative else row.ne, row.trial.job.flops
            if ne is not None and flops and known(flops):
                against = percent(row.relative_percent)
                clause = f" ({against} to its baseline)" if row.relative_percent is not None else ""
                hover = text(
                    f"{name}, trial {row.trial.number}",
                    row.name,
                    f"NE {decimals(row.ne, 5)}{clause}",
                    f"{si(flops)} FLOPs",
                )
                points.append((flops, ne, hover))
        points.sort(key=lambda point: point[0])
        trace = go.Scatter(
            x=[flops for flops, _, _ in points],
            y=[ne for _, ne, _ in points],
            hovertext=[hover for _, _, hover in points],
            hoverinfo="text",
            mode="lines+markers",
            name=text(name),
            line={"color": color, "width": 2, "shape": "hv"},
            marker={"color": color, "size": 9, "symbol": symbol},
        )
        traces.append(trace)
    if not any(len(trace.x) for trace in traces):
        return empty("Shown as soon as one of the studies has a front.", title=title)
    what = "NE against its own baseline" if relative else "NE on validation"
    subtitle = f"{what}, by FLOPs per example; lower left is better. Dotted: the baseline of each."
    figure = drawing(traces, title=title, subtitle=subtitle, height=470)
    for record, color in zip(records, COLORS, strict=True):
        baseline = baseline_ne(record)
        if baseline is not None:
            line = {"color": color, "width": 1, "dash": "dot"}
            figure.add_hline(0.0 if relative else baseline, line=line, layer="below")
    figure.update_xaxes(type="log", title_text="forward FLOPs per example", tickformat=".2~s", dtick="D2")
    figure.update_yaxes(title_text=what, ticksuffix=" %" if relative else "")
    return figure


def names_of(first: StudyRecord, second: StudyRecord) -> tuple[str, str]:
    """Returns what the two are called; by their directories if they have the same name."""
    if first.name != second.name:
        return first.name, second.name
    return f"{first.name} ({first.directory})", f"{second.name} ({second.directory})"


def not_comparable(first: StudyRecord, second: StudyRecord) -> tuple[str, ...]:
    """Returns why NE of the one cannot be held against NE of the other, in sentences; none if it can."""
    one, other = first.log, second.log
    reasons = []
    if one.rows != other.rows or one.base_rate != other.base_rate:
        if one.name == other.name:
            reasons.append(
                f"The log {one.name} is split otherwise, or has other rows: {_rows(first)} and {_rows(second)}."
            )
        else:
            reasons.append(
                f"The logs differ: {one.name} ({_rows(first)}) and {other.name} ({_rows(second)})."
            )
    elif one.fingerprint != other.fingerprint:
        reasons.append(
            f"The prepared logs differ ({one.name} and {other.name}, fingerprints {one.fingerprint} and "
            f"{other.fingerprint}): other rows, or the same ones encoded otherwise."
        )
    if first.period != second.period:
        reasons.append(
            f"NE is of different things: {_judged_by(first)} in the one, {_judged_by(second)} in the other."
        )
    return tuple(reasons)


def best_rows(first: StudyRecord, second: StudyRecord) -> list[tuple[str, str, str]]:
    """Returns the best of each side by side: name of a number, and its text in both studies."""
    one, other = _best(first), _best(second)
    return [(name, one[name], other[name]) for name in one]


def different_settings(first: StudyRecord, second: StudyRecord) -> list[tuple[str, str, str]]:
    """Returns the facts in which the studies differ."""
    one, other = dict(facts(first)), dict(facts(second))
    names = dict.fromkeys((*one, *other))
    return [
        (name, one.get(name, MISSING), other.get(name, MISSING))
        for name in names
        if one.get(name) != other.get(name)
    ]


def _best(record: StudyRecord) -> dict[str, str]:
    trial = find(record, record.best)
    row = trial_rows(record, (trial,))[0] if trial is not None else None
    compared = telling_comparison(record)
    of = f"trial {compared.trial}: " if compared and compared.trial != record.best else ""
    baseline = find(record, record.baseline)
    known: dict[str, Callable[[TrialRow], str]] = {
        "Best": lambda row: f"trial {row.trial.number}, {trial_name(row.trial)}",
        "NE on validation": lambda row: decimals(row.ne, 5),
        "Against its own baseline": lambda row: percent(row.relative_percent),
        "FLOPs per example": lambda row: si(row.trial.job.flops),
        "Dense parameters": lambda row: si(row.trial.job.parameters),
        "Weights": lambda row: byte_size(row.trial.job.weights_bytes),
        "Memory technique": lambda row: row.trial.result.technique or row.trial.plan.technique or MISSING,
        "Predicted peak per rank": lambda row: byte_size(row.trial.plan.peak_bytes),
        "NE on test": lambda row: _ne(row.trial.result.test),
        "Difference on test, 95 % interval": lambda _: (
            f"{of}{percent(compared.difference_percent)} ({interval(compared)}), {len(compared.seeds)} seeds"
            if compared
            else "not confirmed"
        ),
        "Better than its baseline": lambda _: f"{of}{compared.better.value}" if compared else MISSING,
        "Baseline": lambda _: (
            f"trial {baseline.number}, {trial_name(baseline)}, NE {_ne(baseline.result.validation)}"
            if baseline
            else MISSING
        ),
    }
    return {name: text(row) if row is not None else MISSING for name, text in known.items()}


def _ne(metrics: Metrics | None) -> str:
    return decimals(metrics.ne if metrics else None, 5)


def _rows(record: StudyRecord) -> str:
    return ", ".join(f"{split} {rows:,}" for split, rows in record.log.rows.items()) or "no rows known"


def _judged_by(record: StudyRecord) -> str:
    return (
        f"periods of {record.period}, each scored before it is trained on" if record.period else "validation"
    )
