"""What the diagram of a candidate's architecture shows: its boxes, and the shapes between them.

Functions read plain data and are tolerant on purpose: records of other versions must be drawn too, as far as they
are understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.names import UNNAMED
from dhen.cost import LOOKUP, CostRow
from trials.record import TrialRecord

CONCAT = "concat"
BUCKET = "__bucket"
"""End of the names of tables that a numeric column's buckets have."""
DRAWN = {"layers", "family", "embedding_dim", "head", "members", "members_from"}
"""Keys of a model that the diagram has in its boxes; the others are listed below it."""


def architecture(trial: TrialRecord) -> dict[str, Any]:
    """Returns the diagram's data: inputs, layers (equal neighbours counted) and head."""
    model = trial.job.model
    dim = _whole(model.get("embedding_dim"))
    layers = [layer for layer in _sequence(model.get("layers")) if isinstance(layer, Mapping)]
    inputs = _inputs(trial.job.cost, model, layers, dim)
    drawn: list[dict[str, Any]] = []
    embeddings = inputs
    for index, layer in enumerate(layers):
        box = _layer(layer, embeddings, index)
        embeddings = box["out"]
        if drawn and _alike(drawn[-1], box):
            drawn[-1]["count"] += 1
        else:
            drawn.append(box)
    return {
        "family": str(model.get("family") or UNNAMED),
        "dim": dim,
        "tables": sum(row.kind == LOOKUP for row in trial.job.cost),
        "numeric": any(row.name.startswith("features.numeric") for row in trial.job.cost),
        "inputs": inputs,
        "layers": drawn,
        "head": [str(width) for width in _sequence(model.get("head"))],
        "members": _whole(model.get("members")) or 1,
        "settings": _settings({key: value for key, value in model.items() if key not in DRAWN}),
        "average": [*trial.origin.members],
        "retrained": [*trial.origin.retrained_members],
    }


def _layer(layer: Mapping[str, Any], embeddings: int | None, index: int) -> dict[str, Any]:
    modules = [_component(module) for module in _sequence(layer.get("modules"))]
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
        "in": embeddings,
        "each": each,
        "out": each * joined if each is not None else None,
    }


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = (key for key in one if key not in ("first", "count"))
    return all(one[key] == other[key] for key in same)


def _inputs(
    cost: Sequence[CostRow], model: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], dim: int | None
) -> int | None:
    """Returns M, the number of embeddings that reach the first layer; None where the cost table does not say.

    It is what the first layer's shortcut maps from, where that is a map; else tables and numeric inputs are
    counted.
    """
    each = _whole(_layer(layers[0], None, 0)["out"]) if layers else None
    shortcut = next((row.flops for row in cost if row.name == "layer0.shortcut"), 0.0)
    if shortcut and each and dim and not model.get("members"):
        return round(shortcut / (2 * each * dim))
    summed = model.get("buckets", "summed") == "summed"
    tables = [row.name for row in cost if row.kind == LOOKUP]
    entering = [name for name in tables if not (summed and name.endswith(BUCKET))]
    numeric = any(row.name.startswith("features.numeric") for row in cost)
    return len(entering) + numeric or None


def _component(value: Any) -> tuple[str, str]:
    """Name and settings of a module or an ensemble, given as `{"kind": name, ...}` or by its name alone."""
    if not isinstance(value, Mapping):
        return str(value), ""
    rest = {key: setting for key, setting in value.items() if key != "kind"}
    return str(value.get("kind", "?")), ", ".join(f"{key} {text}" for key, text in _settings(rest))


def _settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings in words; those that are not set are left out."""
    return [(key.replace("_", " "), _words(value)) for key, value in values.items() if value is not None]


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "-".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
