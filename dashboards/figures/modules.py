"""What settings bring, from the candidates of a study: each interaction module, each pair of them in a layer, and
where on each ordered axis of the space the good candidates lie.

An additive model is fitted to their NE: a column for each module and each pair that is in some candidates and not
in others, and one for each ordered axis of the space that is no module's own (depth, learning rate and so on), so
that these do not pass for a module's doing. If the layers of a candidate differ, a second model has a column for
each module in each layer. Ablations of winners stand beside it.

The model is a ridge regression with the penalty of the lowest generalised cross-validation error. Intervals are
percentiles over resamples of the candidates, each fitted anew with that penalty. Estimates are shrunk towards 0,
the more so the fewer candidates there are.

Shapes: N candidates, P columns, R resamples.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from dashboards.edges import front_networks
from dashboards.figures.style import BLUE, GRID, PALE_GREY, PURPLE, VERMILION, drawing, empty, frame, text
from dashboards.figures.worth import Estimate, brought, estimates_figure, interval_trace, judged
from dashboards.names import counted_from_one, known, percent
from dashboards.rows import TrialRow, baseline_ne, known_ne, trial_rows
from trials.records.findings import OrderedAxis, Setting, WinnerVerdict
from trials.records.study_record import StudyRecord, relative_ne_percent
from trials.records.trial_record import Outcome, TrialRecord

Floats = NDArray[np.float64]
PENALTIES = np.logspace(-1, 3, 17)
RESAMPLES = 300
SEED = 0
"""Of the resampling: the same study gives the same figure."""
INTERVAL = (2.5, 97.5)
TITLE = "What each interaction module brings"
FEWEST = 12
"""Smallest number of candidates that a model is fitted to."""
WITH = 3
"""Smallest number of candidates that must have a module, and of those that must not."""
MOST_PAIRS, SHOWN_PAIRS, SHOWN_IN_LAYERS = 60, 10, 20
"""Largest numbers of pairs that are fitted, the most frequent ones; that are drawn; of modules by layer drawn."""
PAIR_SCALE = 0.5
"""Factor of a pair's column, whose penalty is then four times a module's: it is credited with what these leave."""
ABLATED = re.compile(r"layer(\d+): (\w+)(?: \(\d+\))?")
"""Name of a module in an ablation."""


class Fit(NamedTuple):
    """A fitted additive model."""

    value_P: Floats
    low_P: Floats
    high_P: Floats
    """Ends of the 95 % intervals."""
    explained: float
    """Share of the variance that is explained of candidates that the model has not seen, one left out at a
    time; 0 or less if it predicts no better than the mean."""


def modules_figure(record: StudyRecord) -> go.Figure:
    """A row for each module, pair, and module of a layer, the best of each first; left of 0 it lowers NE.

    Candidates count that completed, or were stopped and have an expected NE.
    """
    trials: list[TrialRecord] = []
    values: list[float] = []
    for trial in record.candidates:
        # NE that tells something of a candidate's own network; of a stopped one what it was to come to
        ne, outcome = None, trial.result.outcome
        if not trial.shared and trial.job.model.get("layers"):
            if outcome is Outcome.STOPPED:
                ne = trial.result.expected_ne
            elif outcome is Outcome.COMPLETED:
                ne = known_ne(trial)
        if ne is not None and known(ne):
            trials.append(trial)
            values.append(ne)
    count = len(trials)
    if count < FEWEST:
        reason = f"Too few candidates to tell: {count} have an NE, {FEWEST} are needed."
        return empty(reason, title=TITLE)
    modules = _columns(trials, lambda layers: {kind for kinds in layers for kind in kinds})
    if not modules:
        reason = "All candidates have the same modules: what one brings could only be told by leaving it out."
        return empty(reason, title=TITLE)
    # NE in percent of the baseline's; a few candidates that went wrong count as the worst of the others
    baseline = baseline_ne(record)
    worst, base = frame(values).high, baseline if baseline is not None else float(np.median(values))
    y_N = np.array([relative_ne_percent(min(value, worst), base) for value in values])
    # a candidate's place on each ordered axis of the whole model, from 0 (lowest) to 1
    controls = []
    for axis in record.axes:
        positions = [axis.position(axis.value(trial)) for trial in trials]
        placed = [position for position in positions if position is not None]
        if axis.part != "layer" and len(set(placed)) > 1:
            mean = sum(placed) / len(placed)
            controls.append(np.array([mean if position is None else position for position in positions]))
    in_pairs = _columns(
        trials,
        lambda layers: {
            f"{first} + {second}" for kinds in layers for first, second in combinations(sorted(set(kinds)), 2)
        },
    )
    pairs = dict(list(in_pairs.items())[:MOST_PAIRS])
    fits = [_fitted([(modules, 1.0), (pairs, PAIR_SCALE)], controls, y_N)]
    if any(len({tuple(sorted(kinds)) for kinds in _layers(trial)}) > 1 for trial in trials):
        by_layer = _columns(
            trials,
            lambda layers: {f"layer {n}: {kind}" for n, kinds in enumerate(layers, 1) for kind in kinds},
        )
        fits += [_fitted([(by_layer, 1.0)], controls, y_N)] if by_layer else []
    explained = max(fitted for _, fitted in fits)
    groups = [group for rows, _ in fits for group in rows]
    rows: list[Estimate] = []
    # of pairs and of modules by layer those that bring most either way
    for group, most in zip(groups, (len(modules), SHOWN_PAIRS, SHOWN_IN_LAYERS), strict=False):
        strongest = sorted(group, key=lambda row: -abs(row.percent))[:most]
        rows += sorted(strongest, key=lambda row: row.percent)
    sure = [row for row in rows if row.label in modules and row.high is not None and row.high < 0]
    title = f"No module surely lowers NE, by {count} candidates"
    trust = f"It explains {100 * explained:.0f} % of the differences between candidates that it has not seen."
    if explained <= 0:
        rows = [row._replace(better=WinnerVerdict.CANNOT_TELL) for row in rows]
        title = f"What each module brings cannot be told from {count} candidates"
        trust = "The model predicts candidates that it has not seen no better than their mean does."
    elif sure:
        best = min(sure, key=lambda row: row.percent)
        title = f"Of all modules {best.label} brings most: {percent(best.percent)} NE"
    subtitle = (
        f"Change of NE that a module brings, in percent, by an additive model fitted to {count} candidates "
        "(ridge regression, depth and training settings taken into account; 95 % intervals over resampled "
        f"candidates). {trust} A pair is what two modules in one layer bring beyond both alone."
    )
    if len(pairs) > SHOWN_PAIRS:
        subtitle += f" {len(pairs) - SHOWN_PAIRS} more pairs bring less either way."
    # modules removed from winners, in the row of their layer, or of the module if no layer has a row
    labels, ablated = {row.label for row in rows}, []
    for ablation in record.ablations:
        for part in ablation.parts:
            match = ABLATED.fullmatch(part.removed)
            if match is None or part.ne_percent is None:
                continue
            names = (counted_from_one(f"layer{match[1]}: {match[2]}"), match[2])
            label = next((name for name in names if name in labels), None)
            if label is not None:
                removed = counted_from_one(part.removed)
                hover = f"{removed} of trial {ablation.trial}, taken out and trained again"
                ablated.append(brought(part.ne_percent, label, hover))
    return estimates_figure(
        rows,
        title=title,
        subtitle=subtitle,
        axis="change of NE with it, against without it (left is better)",
        words=("lowers NE", "raises NE", "too few candidates to tell"),
        more=[interval_trace(ablated, "ablation of a winner", "diamond", PURPLE)] if ablated else [],
    )


def fit(x_NP: Floats, y_N: Floats) -> Fit:
    """The model of y with a constant and a coefficient for each column, under the penalty of the lowest
    generalised cross-validation error."""
    x, y, rows = x_NP - x_NP.mean(axis=0), y_N - y_N.mean(), len(y_N)
    u, singular, _ = np.linalg.svd(x, full_matrices=False)
    total = float(y @ y)
    lowest, penalty, explained = np.inf, float(PENALTIES[-1]), 0.0
    for tried in PENALTIES:
        share = singular**2 / (singular**2 + tried)
        residual_N = y - u @ (share * (u.T @ y))
        freedom = 1.0 - (share.sum() + 1.0) / rows
        error = float(residual_N @ residual_N) / freedom**2 if freedom > 0.0 else np.inf
        if error < lowest:
            leverage_N = (u**2) @ share + 1.0 / rows
            unseen_N = residual_N / np.maximum(1.0 - leverage_N, 1e-9)
            lowest, penalty = error, float(tried)
            explained = 1.0 - float(unseen_N @ unseen_N) / total if total else 0.0
    counts_RN = np.random.default_rng(SEED).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    values_RP = np.stack([_ridge(x_NP, y_N, counts_N.astype(float), penalty) for counts_N in counts_RN])
    low_P, high_P = np.percentile(values_RP, INTERVAL, axis=0)
    return Fit(_ridge(x_NP, y_N, np.ones(rows), penalty), low_P, high_P, explained)


def _ridge(x_NP: Floats, y_N: Floats, weight_N: Floats, penalty: float) -> Floats:
    """Coefficients under a penalty, with weights of candidates and a constant that is not penalised."""
    weight = weight_N / weight_N.sum()
    x, y = x_NP - weight @ x_NP, y_N - float(weight @ y_N)
    weighted_PN = (x * weight_N[:, None]).T
    coefficients: Floats = np.linalg.solve(weighted_PN @ x + penalty * np.eye(x.shape[1]), weighted_PN @ y)
    return coefficients


def _fitted(
    groups: Sequence[tuple[Mapping[str, Floats], float]], controls: Sequence[Floats], y_N: Floats
) -> tuple[list[list[Estimate]], float]:
    """A row for each column of each group, which has a scale, and what the model explains."""
    scaled = [scale * column for columns, scale in groups for column in columns.values()]
    fitted = fit(np.stack([*scaled, *controls], axis=1), y_N)
    estimates = zip(fitted.value_P, fitted.low_P, fitted.high_P, strict=True)
    rows: list[list[Estimate]] = []
    for columns, scale in groups:
        rows.append([])
        for name, column in columns.items():
            value, low, high = (scale * float(end) for end in next(estimates))
            hover = f"in {int(column.sum())} of {len(y_N)} candidates"
            rows[-1].append(Estimate(name, value, low, high, judged(low, high), (hover,)))
    return rows, fitted.explained


Layers = Sequence[Sequence[str]]
"""Names of the modules by layer."""


def _layers(trial: TrialRecord) -> Layers:
    return [
        [str(module["kind"] if isinstance(module, Mapping) else module) for module in layer["modules"]]
        for layer in trial.job.model["layers"]
    ]


def _columns(trials: Sequence[TrialRecord], names_of: Callable[[Layers], set[str]]) -> dict[str, Floats]:
    """A column of 0 and 1 for each name that enough candidates have and enough have not, most frequent first."""
    having = [names_of(_layers(trial)) for trial in trials]
    counts = Counter(name for names in having for name in names)
    return {
        name: np.array([float(name in names) for names in having])
        for name, count in counts.most_common()
        if WITH <= count <= len(trials) - WITH
    }


# NE against the value of each ordered axis of the space.

AXES_TITLE = "Where on each axis the good candidates lie"
PANEL_COLUMNS, PANEL_HEIGHT = 3, 210
MARGINS = 144
"""Pixels above and below all panels."""
GAP, TALL = 0.06, 0.62
"""Space between two panels as a share of the width, and a panel's share of its row's height."""
TICKS = 4
"""Largest number of labels below a panel that stay apart."""


def axes_figure(record: StudyRecord) -> go.Figure | None:
    """A panel per axis that candidates have, with its ends as lines; lower is better. None if the space has no
    axis.

    A setting that each layer has of its own is one panel.
    """
    if not record.axes:
        return None
    ended = (Outcome.COMPLETED, Outcome.STOPPED)
    rows = [
        row
        for row in trial_rows(record, record.field)
        if row.trial.result.outcome in ended and known(row.relative_percent)
    ]
    by_setting: dict[str, list[OrderedAxis]] = {}
    for axis in record.axes:
        by_setting.setdefault(axis.setting, []).append(axis)
    panels = []
    for name, axes in by_setting.items():
        # a candidate whose layers have one value is one point
        values = [(row, axis.value(row.trial), axis) for row in rows for axis in axes]
        points = {
            (row.trial.number, value): (row, value)
            for row, value, axis in values
            if axis.position(value) is not None
        }
        if points:
            panels.append((name, axes[0], [*points.values()]))  # axes of other layers have the same values
    if not panels:
        return empty(
            "Shown as soon as a candidate has an NE to compare with the baseline's.", title=AXES_TITLE
        )
    on_front = {trial.number for trial in front_networks(record)}
    relative = {row.trial.number: row.relative_percent or 0.0 for _, _, placed in panels for row, _ in placed}
    always = [value for number, value in relative.items() if number in on_front]
    seen = frame(list(relative.values()), [*always, 0.0])
    subtitle = (
        "NE on validation relative to the baseline (the dotted line) against each value; lower is better, "
        "vertical lines are the ends of the space."
    )
    if seen.above:
        subtitle += f" {seen.above} above these frames."
    traces = []
    for index, (name, axis, placed) in enumerate(panels):
        others = [point for point in placed if point[0].trial.number not in on_front]
        front = [point for point in placed if point[0].trial.number in on_front]
        for title, group, shown, look in (
            ("other candidates", "others", others, {"color": PALE_GREY, "size": 7, "symbol": "circle-open"}),
            ("on the front", "front", front, {"color": BLUE, "size": 9}),
        ):
            trace = go.Scatter(
                x=[_x(axis, value) for _, value in shown],
                y=[row.relative_percent for row, _ in shown],
                xaxis=_numbered("x", index),
                yaxis=_numbered("y", index),
                mode="markers",
                name=title,
                legendgroup=group,
                showlegend=index == 0,
                marker=look,
                hovertext=[_axis_hover(name, row, value) for row, value in shown],
                hoverinfo="text",
            )
            traces.append(trace)
    lines = math.ceil(len(panels) / PANEL_COLUMNS)
    figure = drawing(traces, title=AXES_TITLE, subtitle=subtitle, height=MARGINS + PANEL_HEIGHT * lines)
    shapes: list[dict[str, object]] = []
    for index, (name, axis, _) in enumerate(panels):
        column, line = index % PANEL_COLUMNS, index // PANEL_COLUMNS
        left, top = column / PANEL_COLUMNS + (GAP / 2 if column else 0), 1 - line / lines
        right = (column + 1) / PANEL_COLUMNS - (GAP / 2 if column < PANEL_COLUMNS - 1 else 0)
        x, y = _numbered("x", index), _numbered("y", index)
        ends = [_x(axis, end) for end in axis.ends]
        low, high = map(math.log10, ends) if axis.log else ends
        room = 0.08 * (high - low)
        ticks, labels = ends, [f"{end:g}" for end in ends]
        if axis.values:
            places = range(0, len(axis.values), math.ceil(len(axis.values) / TICKS))
            ticks, labels = [*places], [text(str(axis.values[place])) for place in places]
        figure.layout[f"xaxis{index + 1}"] = {
            "title": {"text": text(name), "font": {"size": 12}, "standoff": 4},
            "range": [low - room, high + room],
            "type": "log" if axis.log else "linear",
            "gridcolor": GRID,
            "zeroline": False,
            "showgrid": False,
            "tickvals": ticks,
            "ticktext": labels,
            "domain": [left, right],
            "anchor": y,
        }
        figure.layout[f"yaxis{index + 1}"] = {
            "domain": [top - TALL / lines, top],
            "anchor": x,
            "range": [seen.low, seen.high],
            "ticksuffix": " %",
            "showticklabels": column == 0,
            "nticks": 5,
            "gridcolor": GRID,
            "zeroline": False,
        }
        shape = {"type": "line", "layer": "below"}
        grey = {"color": PALE_GREY, "width": 1}
        for end in ends:
            place = {"x0": end, "x1": end, "y0": 0, "y1": 1, "xref": x, "yref": f"{y} domain"}
            shapes.append(shape | place | {"line": grey})
        baseline = {"x0": 0, "x1": 1, "y0": 0, "y1": 0, "xref": f"{x} domain", "yref": y}
        shapes.append(shape | baseline | {"line": {"color": VERMILION, "width": 1, "dash": "dot"}})
    figure.layout.shapes = shapes
    figure.update_xaxes(ticks="", showline=False)
    return figure


def _x(axis: OrderedAxis, value: Setting) -> float:
    """Where a value of the axis is drawn: a number at itself, one of a choice at its place among the values."""
    if axis.values:
        return float(axis.values.index(value))
    assert isinstance(value, (int, float))
    return float(value)


def _axis_hover(name: str, row: TrialRow, value: Setting) -> str:
    words = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text(
        row.heading, row.name, f"{name} {words}", f"NE {percent(row.relative_percent)} to the baseline"
    )


def _numbered(axis: str, index: int) -> str:
    """Plotly's name of an axis; the first has no number."""
    return axis if index == 0 else f"{axis}{index + 1}"
