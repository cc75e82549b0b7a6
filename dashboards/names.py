"""A model in short, from its configuration: `3x[attention+dlrm] concat d16`; and outcomes in words.

The functions read plain data and are tolerant on purpose: a report must also show what they do not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from trials.records.trial_record import Outcome, TrialRecord

UNNAMED = "model"
IN_WORDS = {
    Outcome.RUNNING: "running",
    Outcome.COMPLETED: "completed",
    Outcome.STOPPED: "stopped early",
    Outcome.INFEASIBLE: "infeasible",
    Outcome.OUT_OF_MEMORY: "out of memory",
    Outcome.DIVERGED: "diverged",
    Outcome.FAILED: "failed",
    Outcome.INTERRUPTED: "interrupted",
}
_LAYER = re.compile(r"\blayer(\d+)")


def counted_from_one(text: str) -> str:
    """A text with layers as people count them: `layer 1: attention` for `layer0: attention`."""
    return _LAYER.sub(lambda match: f"layer {int(match[1]) + 1}", text)


def trial_name(trial: TrialRecord) -> str:
    """A trial's model in short; for an average, what it is the mean of: `average of trials 3, 5 and 7`."""
    members, retrained = trial.origin.members, trial.origin.retrained_members
    if not members and not retrained:
        return short_name(trial.job.model)
    trials = [*map(str, members), *(f"retraining {number}" for number in retrained)]
    noun = {0: "", 1: "trial "}.get(len(members), "trials ")
    return f"average of {noun}{', '.join(trials[:-1])} and {trials[-1]}"


def short_name(model: Mapping[str, Any]) -> str:
    """Layers bottom to top (equal neighbours counted), how modules are ensembled, embedding dimension.

    `2x[attention+dlrm] > [linear] concat d16` (`d16 n^-0.25` if the dimension falls with a table's rows), with
    `capacity 25%` behind it if growing tables have a share of theirs, `buckets apart` or `buckets interpolated`
    if they are not summed, and `4 members` if the model has several; a family without layers is called by
    its own name, with the widths of its MLP and its number of experts: `advanced_dlrm 256-128 4 experts d16`.
    """
    layers = [layer for layer in as_list(model.get("layers")) if isinstance(layer, Mapping)]
    modules = ["[" + "+".join(map(_kind, as_list(layer.get("modules")))) + "]" for layer in layers]
    # a module alone needs no ensemble
    ensembles = [
        _kind(layer["ensemble"])
        if layer.get("ensemble") is not None and len(as_list(layer.get("modules"))) > 1
        else ""
        for layer in layers
    ]
    common, experts = set(ensembles) - {""}, model.get("experts")
    if not layers:
        family = (
            str(model.get("family") or UNNAMED),
            "-".join(str(width) for width in as_list(model.get("mlp"))),
            f"{experts} experts" if isinstance(experts, int) and experts > 1 else "",
        )
        body = " ".join(word for word in family if word)
    elif len(common) <= 1:  # all layers that join modules have one ensemble: name it once
        body = " ".join((_counted(modules), *common))
    else:
        body = _counted(" ".join(filter(None, pair)) for pair in zip(modules, ensembles, strict=True))
    dimension, exponent = model.get("embedding_dim"), model.get("table_dim_exponent")
    shorter = f" n^-{exponent}" if exponent else ""  # if larger tables have shorter embeddings
    members, share = model.get("members", 1), model.get("capacity_share", 1.0)
    words = (
        body if dimension is None else f"{body} d{dimension}{shorter}",
        f"capacity {share:.0%}" if share < 1.0 else "",
        f"buckets {model['buckets']}" if model.get("buckets", "summed") != "summed" else "",
        "" if members == 1 else f"{members} members",
    )
    return " ".join(word for word in words if word)


def _counted(names: Iterable[str]) -> str:
    """Names in one line: equal neighbours as `3x...`, different ones with ` > ` between them."""
    runs = ((name, len(list(group))) for name, group in groupby(names))
    return " > ".join(f"{count}x{name}" if count > 1 else name for name, count in runs)


def _kind(value: Any) -> str:
    """The name of a component given as `{"kind": name, ...}` or by its name alone."""
    return str(value.get("kind", "?")) if isinstance(value, Mapping) else str(value)


def as_list(value: Any) -> list[Any]:
    """A value as a list; empty for what is no sequence."""
    return list(value) if isinstance(value, (list, tuple)) else []


# Numbers in words: the one place that decides how many digits a reader sees.

MISSING = "–"
PREFIXES = ("", "k", "M", "G", "T", "P")


def known(value: float | None) -> bool:
    """Whether a value is neither missing nor NaN nor infinite, so that it can be shown and drawn."""
    return value is not None and math.isfinite(value)


def decimals(value: float | None, digits: int) -> str:
    """A number with so many digits after the point: `0.81234`."""
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else MISSING


def percent(value: float | None) -> str:
    """A signed difference: `-0.27 %`."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:+.2f} %" if abs(value) >= 0.005 else "0.00 %"


def percent_range(low: float | None, high: float | None) -> str:
    """A range of signed differences: `-0.41 to -0.12 %`."""
    return f"{percent(low).removesuffix(' %')} to {percent(high)}"


def ratio(value: float | None) -> str:
    """A ratio in three digits: `0.42x`, `13x`."""
    return f"{value:.3g}x" if value is not None and math.isfinite(value) else MISSING


def si(value: float | None) -> str:
    """A number in three digits, with a prefix for thousands: `1.23 M`, `998`, `12`."""
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    if not power:
        return f"{value:.3g}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {PREFIXES[power]}"


def byte_size(value: float | None) -> str:
    """A number of bytes with its unit: `1.5 GiB`."""
    if value is None or not math.isfinite(value):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def milliseconds(value: float | None) -> str:
    """A time in three digits: `0.531 ms`, `12.4 ms`."""
    return f"{value:.3g} ms" if value is not None and math.isfinite(value) else MISSING


def duration(seconds: float | None) -> str:
    """A time in words: `0.4 s`, `12 s`, `3 min 05 s`, `1 h 07 min`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
