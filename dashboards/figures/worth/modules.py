"""What each interaction module brings, and each pair of them in a layer, from the candidates of a study.

An additive model is fitted to their NE (`dashboards.figures.worth.additive`): a column for each module and each
pair that is in some candidates and not in others, and one for each ordered axis of the space that is no module's
own (depth, learning rate and so on), so that these do not pass for a module's doing. Where the layers of a
candidate differ, a second model has a column for each module in each layer. Ablations of winners stand beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.style import PURPLE, empty
from dashboards.figures.worth.additive import Fit, Floats, fit
from dashboards.figures.worth.columns import (
    columns_of,
    controls_of,
    layers_differ,
    modules_by_layer,
    modules_in,
    ne_of,
    pairs_in,
    relative,
)
from dashboards.figures.worth.estimates import Estimate, estimates_figure, interval_trace, judged
from dashboards.names import counted_from_one
from dashboards.rows import baseline_ne
from dashboards.units import percent
from trials.analyses import Ablation, Better
from trials.study_record import StudyRecord

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleValue:
    """A module, a pair of them, or a module in one layer."""

    name: str
    group: str
    """`module`, `pair` or `layer`."""
    candidates: int
    """Number of candidates that have it."""
    percent: float
    """Change of NE that it brings, in percent of the baseline's; negative is better."""
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AblatedModule:
    """What a module of a winner was worth by its ablation."""

    name: str
    """Name of the row that it stands in."""
    trial: int
    removed: str
    percent: float
    """Change of NE that it brings; negative is better."""
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulesInfo:
    """What the figure shows."""

    values: tuple[ModuleValue, ...]
    """Modules, then pairs, then modules by layer, the best of each first."""
    ablated: tuple[AblatedModule, ...]
    candidates: int
    """Number of candidates that the model was fitted to."""
    explained: float
    """Share of the differences between unseen candidates that the model explains; 0 or less: none."""
    pairs_left_out: int
    """Number of pairs that are not drawn, as they bring less either way."""
    reason: str | None
    """Why nothing was fitted; None where something was."""


def modules_info(record: StudyRecord) -> ModulesInfo:
    """What the figure shows: candidates that completed, or were stopped and have an expected NE."""
    reference = baseline_ne(record)
    found = [(trial, ne) for trial in record.candidates if (ne := ne_of(trial)) is not None]
    trials, values = [trial for trial, _ in found], [ne for _, ne in found]
    if len(trials) < FEWEST:
        return _nothing(
            len(trials), f"Too few candidates to tell: {len(trials)} have an NE, {FEWEST} are needed."
        )
    modules = columns_of(trials, modules_in, WITH)
    if not modules:
        reason = "All candidates have the same modules: what one brings could only be told by leaving it out."
        return _nothing(len(trials), reason)
    y_N = relative(values, reference)
    controls = controls_of(trials, record.axes)
    pairs = dict(list(columns_of(trials, pairs_in, WITH).items())[:MOST_PAIRS])
    layers = columns_of(trials, modules_by_layer, WITH) if any(map(layers_differ, trials)) else {}
    whole = _fitted({**_named("module", modules), **_named("pair", pairs)}, controls, y_N)
    by_layer = _fitted(_named("layer", layers), controls, y_N) if layers else None
    rows = [*whole[0], *(by_layer[0] if by_layer else ())]
    shown = _shown(rows)
    return ModulesInfo(
        values=tuple(shown),
        ablated=tuple(_ablated(record.ablations, {row.name for row in shown})),
        candidates=len(trials),
        explained=max(whole[1].explained, by_layer[1].explained if by_layer else -1.0),
        pairs_left_out=sum(row.group == "pair" for row in rows) - sum(row.group == "pair" for row in shown),
        reason=None,
    )


def modules_figure(info: ModulesInfo) -> go.Figure:
    """A row for each module, pair, and module of a layer; left of 0 it lowers NE."""
    if info.reason is not None:
        return empty(info.reason, title=TITLE)
    rows = [
        Estimate(
            label=value.name,
            percent=value.percent,
            low=value.low,
            high=value.high,
            better=judged(value.low, value.high) if info.explained > 0 else Better.CANNOT_TELL,
            hover=(f"in {value.candidates} of {info.candidates} candidates",),
        )
        for value in info.values
    ]
    subtitle = (
        f"Change of NE that a module brings, in percent, by an additive model fitted to "
        f"{info.candidates} candidates "
        "(ridge regression, depth and training settings taken into account; 95 % intervals over resampled "
        f"candidates). {_trust(info)} A pair is what two modules in one layer bring beyond both alone."
    )
    if info.pairs_left_out:
        subtitle += f" {info.pairs_left_out} more pairs bring less either way."
    words = ("lowers NE", "raises NE", "too few candidates to tell")
    more = [_ablation_trace(info)] if info.ablated else []
    axis = "change of NE with it, against without it (left is better)"
    return estimates_figure(rows, title=_title(info), subtitle=subtitle, axis=axis, words=words, more=more)


def _nothing(candidates: int, reason: str) -> ModulesInfo:
    return ModulesInfo(
        values=(), ablated=(), candidates=candidates, explained=0.0, pairs_left_out=0, reason=reason
    )


def _named(group: str, columns: Mapping[str, Floats]) -> dict[tuple[str, str], Floats]:
    return {(group, name): column for name, column in columns.items()}


def _fitted(
    columns: Mapping[tuple[str, str], Floats], controls: Sequence[Floats], y_N: Floats
) -> tuple[list[ModuleValue], Fit]:
    scales = [PAIR_SCALE if group == "pair" else 1.0 for group, _ in columns]
    scaled = [scale * column for scale, column in zip(scales, columns.values(), strict=True)]
    fitted = fit(np.stack([*scaled, *controls], axis=1), y_N)
    rows = [
        ModuleValue(
            name=name,
            group=group,
            candidates=int(column.sum()),
            percent=scales[index] * float(fitted.value_P[index]),
            low=scales[index] * float(fitted.low_P[index]),
            high=scales[index] * float(fitted.high_P[index]),
        )
        for index, ((group, name), column) in enumerate(columns.items())
    ]
    return rows, fitted


def _shown(rows: Iterable[ModuleValue]) -> list[ModuleValue]:
    """Rows by group, the best first; of pairs and of modules by layer those that bring most either way."""
    most = {"module": 1000, "pair": SHOWN_PAIRS, "layer": SHOWN_IN_LAYERS}
    groups: dict[str, list[ModuleValue]] = {group: [] for group in most}
    for row in sorted(rows, key=lambda row: -abs(row.percent)):
        if len(groups[row.group]) < most[row.group]:
            groups[row.group].append(row)
    return [row for group in groups.values() for row in sorted(group, key=lambda row: row.percent)]


def _ablated(ablations: Iterable[Ablation], rows: set[str]) -> Iterable[AblatedModule]:
    """Modules that were taken out of winners, in the row of their layer, or where there is none of the module."""
    for ablation in ablations:
        for part in ablation.parts:
            match, ne = ABLATED.fullmatch(part.removed), part.ne_percent
            if match is None or ne is None:
                continue
            names = (counted_from_one(f"layer{match[1]}: {match[2]}"), match[2])
            name = next((name for name in names if name in rows), None)
            if name is not None:
                yield AblatedModule(
                    name=name,
                    trial=ablation.trial,
                    removed=counted_from_one(part.removed),
                    percent=-ne.mean,
                    low=_negative(ne.high),
                    high=_negative(ne.low),
                )


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _ablation_trace(info: ModulesInfo) -> go.Scatter:
    rows = [
        Estimate(
            label=each.name,
            percent=each.percent,
            low=each.low,
            high=each.high,
            better=judged(each.low, each.high),
            hover=(f"{each.removed} of trial {each.trial}, taken out and trained again",),
        )
        for each in info.ablated
    ]
    return interval_trace(rows, "ablation of a winner", "diamond", PURPLE)


def _trust(info: ModulesInfo) -> str:
    if info.explained <= 0:
        return "The model predicts candidates that it has not seen no better than their mean does."
    return f"It explains {100 * info.explained:.0f} % of the differences between candidates that it has not seen."


def _title(info: ModulesInfo) -> str:
    if info.explained <= 0:
        return f"What each module brings cannot be told from {info.candidates} candidates"
    sure = [value for value in info.values if value.group == "module" and value.high < 0]
    if not sure:
        return f"No module surely lowers NE, by {info.candidates} candidates"
    best = min(sure, key=lambda value: value.percent)
    return f"Of all modules {best.name} brings most: {percent(best.percent)} NE"
