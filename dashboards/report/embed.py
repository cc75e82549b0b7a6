"""The study as the page's scripts read it: plain data, each thing once.

A thousand candidates repeat themselves: modules of equal size cost the same, trainings are evaluated at the same
numbers of examples, points have the same axes. What repeats stands in lists of its own, and a trial has its place
there.

What reads models and cost tables is tolerant on purpose: records of other versions must be drawn too, as far as
they are understood. The names of a cost table's rows show where they belong: `layer0.attention1.qkv` is the row
`qkv` of the module `attention1` of `layer0`, `head0.relu` a row of the head, and `features.table.C1` one of the
embedding tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, TypeVar

from dashboards.names import IN_WORDS, UNNAMED, as_list, byte_size, counted_from_one, duration, known
from dashboards.plans import held
from dashboards.report.answers import cluster_words, export_line
from dashboards.rows import ReportColumn, TrialRow, columns_of, trial_rows
from dhen.cost import ATTENTION, LOOKUP, MATMUL, CostRow
from trials.records.study_record import StudyRecord, relative_ne_curve
from trials.records.trial_record import TrialRecord

T = TypeVar("T")
PERCENT_SCALE, NE_SCALE = 1e4, 1e6
"""Values of curves are whole numbers: percents times the first, NE times the second."""
MOST_POINTS = 120
"""Points of a curve that are kept; a panel is some 600 pixels wide."""


CONCAT = "concat"
BUCKET = "__bucket"
"""End of the names of tables that a numeric column's buckets have."""
DRAWN = {"layers", "family", "embedding_dim", "head", "members", "members_from"}
"""Keys of a model that the diagram has in its boxes; the others are listed below it."""
COUNTED = (MATMUL, ATTENTION)
"""Kinds of rows that make up the FLOPs that are reported."""
_NUMBERED = re.compile(r"(.*?)(\d+)")


class SharedValues:
    """Values that several trials have, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, value: Callable[[], Any]) -> int:
        """Returns the place of the value with this key, which is made and added if it is new."""
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value())
        return self._places[key]


def study_data(record: StudyRecord) -> dict[str, Any]:
    """Returns all that the scripts of the page know of a study."""
    columns, costs, grids, axes = columns_of(record), SharedValues(), SharedValues(), SharedValues()
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
                "number": column.unit is not None,
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
    row: TrialRow,
    record: StudyRecord,
    columns: Sequence[ReportColumn],
    shared: tuple[SharedValues, SharedValues, SharedValues],
) -> dict[str, Any]:
    trial, (costs, grids, axes) = row.trial, shared
    cells = [column.cell(row) for column in columns]
    numbers = [number for column, (_, number) in zip(columns, cells, strict=True) if column.unit]
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
        # a layer's name and the places of its modules' costs
        "cost": [
            [layer, [costs.place(module, partial(_module, *module)) for module in modules.items()]]
            for layer, modules in folded(trial.job.cost).items()
        ],
        "held": held(trial),
        "curve": _curve(trial, record, grids),
        "attempts": [
            [
                attempt.strategy,
                IN_WORDS[attempt.outcome],
                attempt.executed or "",
                byte_size(attempt.predicted_bytes),
                byte_size(attempt.measured_bytes),
                duration(attempt.seconds),
                # a moved attempt ended because of its slow rank
                "; ".join(dict.fromkeys(filter(None, (attempt.replaced, attempt.slow_rank, attempt.error)))),
            ]
            for attempt in trial.attempts
        ],
        "point": [
            # what can't stand in JSON as it is, is a text
            [
                axes.place(axis, partial(str, axis)),
                value
                if isinstance(value, (bool, int, NoneType)) or (isinstance(value, float) and known(value))
                else str(value),
            ]
            for axis, value in trial.point.items()
        ],
    }


def _module(name: str, rows: Sequence[CostRow]) -> dict[str, Any]:
    return {
        "name": name,
        "flops": _short(sum(row.flops for row in rows if row.kind in COUNTED)),
        "other": _short(sum(row.flops for row in rows if row.kind not in COUNTED)),  # elementwise work
        "parameters": sum(row.parameters for row in rows),
        "bytes": _short(sum(row.bytes for row in rows)),  # of table rows looked up per example
        "rows": [[row.name, row.kind, _short(row.flops), row.parameters] for row in rows],
    }


def _curve(trial: TrialRecord, record: StudyRecord, grids: SharedValues) -> dict[str, Any] | None:
    """Returns the learning curve relative to the baseline's; if there is none to compare with, of NE."""
    baseline = record.baseline_for(trial)
    pairs: Sequence[tuple[int, float]] = ()
    if baseline:
        pairs = relative_ne_curve(trial.result.curve, baseline.result.curve)
    scale, relative = PERCENT_SCALE, {"relative": True}
    if not pairs:
        pairs = list(zip(trial.result.curve.examples, trial.result.curve.ne, strict=True))
        scale, relative = NE_SCALE, {}
    if not pairs:
        return None
    kept = thinned(pairs, MOST_POINTS)
    examples = tuple(count for count, _ in kept)
    values = [round(value * scale) if known(value) else None for _, value in kept]
    return {"grid": grids.place(examples, lambda: list(examples)), "values": values} | relative


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Returns values at even distances, the first and the last among them; all if they are no more than
    `most`, which is two or more."""
    if len(values) <= most:
        return list(values)
    step = (len(values) - 1) / (most - 1)
    return [values[round(place * step)] for place in range(most)]


def _short(value: float) -> float | int | None:
    """A number in whole units if it is large enough; None for NaN and infinity."""
    if not known(value):
        return None
    return round(value) if abs(value) >= 100 or value == round(value) else round(value, 2)


def architecture(trial: TrialRecord) -> dict[str, Any]:
    """Returns the diagram's data: inputs, layers (equal neighbours counted) and head."""
    model, cost = trial.job.model, trial.job.cost
    dim = _whole(model.get("embedding_dim"))
    layers = [layer for layer in as_list(model.get("layers")) if isinstance(layer, Mapping)]
    boxes = [_layer(layer, index) for index, layer in enumerate(layers)]
    tables = [row.name for row in cost if row.kind == LOOKUP]
    numeric = any(row.name.startswith("features.numeric") for row in cost)
    # the embeddings that reach the first layer: what its shortcut maps from, if that is a map; else tables and
    # numeric inputs are counted
    summed = model.get("buckets", "summed") == "summed"
    inputs = sum(not (summed and name.endswith(BUCKET)) for name in tables) + numeric or None
    each = boxes[0]["out"] if boxes else None
    shortcut = next((row.flops for row in cost if row.name == "layer0.shortcut"), 0.0)
    if shortcut and each and dim and not model.get("members"):
        inputs = round(shortcut / (2 * each * dim))
    drawn: list[dict[str, Any]] = []
    embeddings = inputs
    for box in boxes:
        box["in"], embeddings = embeddings, box["out"]
        if drawn and drawn[-1] | {"first": box["first"], "count": 1} == box:
            drawn[-1]["count"] += 1
        else:
            drawn.append(box)
    return {
        "family": str(model.get("family") or UNNAMED),
        "dim": dim,
        "tables": len(tables),
        "numeric": numeric,
        "inputs": inputs,
        "layers": drawn,
        "head": [str(width) for width in as_list(model.get("head"))],
        "members": _whole(model.get("members")) or 1,
        "settings": _settings({key: value for key, value in model.items() if key not in DRAWN}),
        "average": [*trial.origin.members],
        "retrained": [*trial.origin.retrained_members],
    }


def _layer(layer: Mapping[str, Any], index: int) -> dict[str, Any]:
    modules = [_component(module) for module in as_list(layer.get("modules"))]
    ensemble = _component(layer.get("ensemble", "sum"))
    each = _whole(layer.get("out_embeddings"))
    joined = len(modules) if ensemble[0] == CONCAT and len(modules) > 1 else 1
    return {
        "first": index + 1,
        "count": 1,
        "modules": modules,
        "ensemble": ensemble if len(modules) > 1 else None,
        "norm": str(layer.get("norm", "layer")),
        "pre": layer.get("norm_placement") == "pre",
        "shortcut": layer.get("shortcut", True) is not False,
        "raw": bool(layer.get("raw_numeric")),
        "in": None,  # what the layer before puts out
        "each": each,
        "out": each * joined if each is not None else None,
    }


def _component(value: Any) -> tuple[str, str]:
    """Name and settings of a module or an ensemble, given as `{"kind": name, ...}` or by its name alone."""
    if not isinstance(value, Mapping):
        return str(value), ""
    rest = {key: setting for key, setting in value.items() if key != "kind"}
    return str(value.get("kind", "?")), ", ".join(f"{key} {text}" for key, text in _settings(rest))


def _settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings in words; those that are not set are left out."""
    words = []
    for key, value in values.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if isinstance(value, (list, tuple)):
            text = "-".join(map(str, value)) or "none"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        if value is not None:
            words.append((key.replace("_", " "), text))
    return words


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def folded(cost: Iterable[CostRow]) -> dict[str, dict[str, tuple[CostRow, ...]]]:
    """Returns the rows of a cost table by layer and module, both in the order in which they first occur; rows are
    named from the module on."""
    layers: dict[str, dict[str, list[CostRow]]] = {}
    for row in cost:
        layer, module, rest = _place(row.name)
        named = CostRow(rest, row.kind, row.flops, row.parameters, row.bytes)
        layers.setdefault(layer, {}).setdefault(module, []).append(named)
    named_layers: dict[str, dict[str, tuple[CostRow, ...]]] = {}
    for layer, modules in layers.items():
        named_layers[counted_from_one(layer)] = of_layer = {}
        for module, rows in modules.items():
            # `attention` for `attention0` if the layer has one, else `attention 1`, `attention 2` ...
            kind = _unnumbered(module)
            alike = [other for other in modules if _unnumbered(other) == kind]
            several = kind != module and len(alike) > 1
            of_layer[f"{kind} {alike.index(module) + 1}" if several else kind] = tuple(rows)
    return named_layers


def _place(name: str) -> tuple[str, str, str]:
    """The layer, the module and the rest of a row's name."""
    first, _, rest = name.partition(".")
    if first == "features":
        if rest.startswith("table."):
            return first, "embedding tables", rest.removeprefix("table.")
        return first, _unnumbered(rest.partition(".")[0]), rest
    if first.startswith("layer") and rest:
        module, _, part = rest.partition(".")
        return first, module, part or module
    return _unnumbered(first), _unnumbered(first), name


def _unnumbered(name: str) -> str:
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else name
