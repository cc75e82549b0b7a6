"""The study as the page's scripts read it: plain data, each thing once.

A thousand candidates repeat themselves: modules of equal size cost the same, trainings are evaluated at the same
numbers of examples, points have the same axes. What repeats stands in lists of its own, and a trial has its place
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from dashboards.report.answers import cluster_words
from dashboards.report.architecture import architecture
from dashboards.report.columns import Column, columns_of
from dashboards.report.commands import export_line
from dashboards.report.cost_tree import ModuleCost, folded
from dashboards.report.held import held
from dashboards.report.thin_curves import thinned
from dashboards.rows import TrialRow, trial_rows
from dashboards.sentences.summary import IN_WORDS
from dashboards.units import byte_size, duration, known
from trials.record import Attempt, Curve, TrialRecord
from trials.study_record import StudyRecord, relative_ne_curve

PERCENT_SCALE, NE_SCALE = 1e4, 1e6
"""Values of curves are whole numbers: percents times the first, NE times the second."""
MOST_POINTS = 120
"""Points of a curve that are kept; a panel is some 600 pixels wide."""


class Shared:
    """Values that several trials have, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, value: Callable[[], Any]) -> int:
        """Returns the place of the value with this key, which is made and added where it is new."""
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value())
        return self._places[key]


def study_data(record: StudyRecord) -> dict[str, Any]:
    """Returns all that the scripts of the page know of a study."""
    columns, costs, grids, axes = columns_of(record), Shared(), Shared(), Shared()
    kept = record.exportable
    trials = [
        _trial(row, record, columns, (costs, grids, axes))
        | {"export": export_line(record, row.trial.number) if row.trial.number in kept else None}
        for row in trial_rows(record)
    ]
    return {
        "study": {
            "name": record.name,
            "directory": record.directory,
            "baseline": record.baseline,
            "best": record.best,
            "hbm": record.cluster.hbm if record.cluster else None,
            "cluster": cluster_words(record.cluster) if record.cluster else None,
            "scales": [PERCENT_SCALE, NE_SCALE],
        },
        "columns": [
            {
                "id": column.id,
                "title": column.title,
                "help": column.help,
                "number": column.number is not None,
                "shown": column.shown.value,
            }
            for column in columns
        ],
        "trials": trials,
        "costs": costs.values,
        "grids": grids.values,
        "axes": axes.values,
    }


def as_json(data: Any) -> str:
    """Returns JSON that may stand in a `<script>`: it is ASCII, and no tag can begin or end in it.

    Raises:
        ValueError: for NaN and infinity, which JSON does not have.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _trial(
    row: TrialRow, record: StudyRecord, columns: Sequence[Column], shared: tuple[Shared, Shared, Shared]
) -> dict[str, Any]:
    trial, (costs, grids, axes) = row.trial, shared
    cells = [column.cell(row) for column in columns]
    numbers = [number for column, (_, number) in zip(columns, cells, strict=True) if column.number]
    return {
        "n": trial.number,
        "kind": trial.kind.value,
        "outcome": trial.result.outcome.value,
        "marks": list(row.marks),
        "name": row.name,
        "cells": [text for text, _ in cells],
        "keys": numbers,
        "flops": trial.job.flops if known(trial.job.flops) else None,
        "model": architecture(trial),
        "cost": _cost(trial, costs),
        "held": held(trial),
        "curve": _curve(trial, record, grids),
        "attempts": [_attempt(attempt) for attempt in trial.attempts],
        "point": [
            [axes.place(axis, partial(str, axis)), value if known_scalar(value) else str(value)]
            for axis, value in trial.point.items()
        ],
    }


def known_scalar(value: Any) -> bool:
    """Whether a value can stand in JSON as it is."""
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and known(value))


def _cost(trial: TrialRecord, costs: Shared) -> list[list[Any]]:
    """Pairs of a layer's name and the places of its modules' costs."""
    return [
        [
            layer.name,
            [costs.place((module.name, module.rows), partial(_module, module)) for module in layer.modules],
        ]
        for layer in folded(trial.job.cost)
    ]


def _module(module: ModuleCost) -> dict[str, Any]:
    return {
        "name": module.name,
        "flops": _short(module.flops),
        "other": _short(module.other_flops),
        "parameters": module.parameters,
        "bytes": _short(module.bytes),
        "rows": [[row.name, row.kind, _short(row.flops), row.parameters] for row in module.rows],
    }


def _curve(trial: TrialRecord, record: StudyRecord, grids: Shared) -> dict[str, Any] | None:
    """Returns the learning curve relative to the baseline's; where there is none to compare with, of NE."""
    baseline = record.baseline_for(trial)
    pairs = relative_ne_curve(trial.result.curve, baseline.result.curve) if baseline else ()
    if pairs:
        return _points(pairs, PERCENT_SCALE, grids) | {"relative": True}
    return _points(_absolute(trial.result.curve), NE_SCALE, grids) if trial.result.curve else None


def _absolute(curve: Curve) -> list[tuple[int, float]]:
    return list(zip(curve.examples, curve.ne, strict=True))


def _points(pairs: Sequence[tuple[int, float]], scale: float, grids: Shared) -> dict[str, Any]:
    kept = thinned(pairs, MOST_POINTS)
    examples = tuple(count for count, _ in kept)
    values = [round(value * scale) if known(value) else None for _, value in kept]
    return {"grid": grids.place(examples, lambda: list(examples)), "values": values}


def _attempt(attempt: Attempt) -> list[str]:
    return [
        attempt.strategy,
        IN_WORDS[attempt.outcome],
        attempt.executed or "",
        byte_size(attempt.predicted_bytes),
        byte_size(attempt.measured_bytes),
        duration(attempt.seconds),
        # one that was moved ended for what is said of its slow rank
        "; ".join(dict.fromkeys(filter(None, (attempt.replaced, attempt.slow_rank, attempt.error)))),
    ]


def _short(value: float) -> float | int | None:
    """A number in whole units where it is large enough; None for NaN and infinity."""
    if not known(value):
        return None
    return round(value) if abs(value) >= 100 or value == round(value) else round(value, 2)
