"""What a ranker sees of a candidate: numbers of the decoded network, its cost and how it is trained.

They describe the network, not the point: points that decode to the same network have the same features, the
order of modules and settings of absent modules have none. Shares (how many attention modules a layer has) are 0
where there is nothing; sizes (heads of attention) are as the average of the others where there is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dhen.config import DhenConfig
from search.samplers.static_cost import Appraisal

LOG_FROM_RATIO = 4.0
"""Sizes that are all positive and differ by this factor or more are compared by their logarithms."""
SAYS_NOTHING = 1e-9
"""Deviation of a column that is the same for all."""
DESCRIBED_APART = ("layers", "members", "members_from")


@dataclass(frozen=True)
class Description:
    """Named numbers of one candidate."""

    shares: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)


def describe(appraisal: Appraisal) -> Description:
    """A candidate in numbers: the first, the last and the average layer, the whole network, its training."""
    model = appraisal.candidate.model
    found = Description(
        sizes={"flops": max(appraisal.flops, 1.0), "parameters": max(appraisal.parameters, 1)}
    )
    found.sizes.update(depth=len(model.layers), members=model.members, members_from=model.members_from)
    _take("model", {key: value for key, value in model if key not in DESCRIBED_APART}, found)
    _take("training", appraisal.candidate.training, found)
    layers = _layers(model)
    for name, chosen in (("layers", layers), ("first", layers[:1]), ("last", layers[-1:])):
        _average(name, chosen, found)
    return found


class Encoder:
    """Descriptions as standardised numbers, by these descriptions' names, means and deviations."""

    def __init__(self, described: Sequence[Description]) -> None:
        """Columns that say nothing, or what another says, are left out."""
        self._shares = sorted({name for each in described for name in each.shares})
        self._sizes = sorted({name for each in described for name in each.sizes})
        x_NF = self._raw(described)
        low_F, high_F = np.nanmin(x_NF, axis=0), np.nanmax(x_NF, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._logarithmic = (low_F > 0) & (high_F / low_F >= LOG_FROM_RATIO)
        x_NF = self._scaled(x_NF)
        self._mean_F, self._deviation_F = np.nanmean(x_NF, axis=0), np.nanstd(x_NF, axis=0)
        self._kept = np.flatnonzero(self._deviation_F > SAYS_NOTHING)
        _, first = np.unique(self.matrix(described).round(6), axis=1, return_index=True)
        self._kept = self._kept[np.sort(first)]

    def matrix(self, described: Sequence[Description]) -> np.ndarray:
        """x_NF."""
        x_NF = (self._scaled(self._raw(described)) - self._mean_F)[:, self._kept]
        found: np.ndarray = np.nan_to_num(x_NF / self._deviation_F[self._kept])
        return found

    def _raw(self, described: Sequence[Description]) -> np.ndarray:
        shares = [[each.shares.get(name, 0.0) for name in self._shares] for each in described]
        sizes = [[each.sizes.get(name, math.nan) for name in self._sizes] for each in described]
        return np.hstack([np.array(shares).reshape(len(described), -1), np.array(sizes)])

    def _scaled(self, x_NF: np.ndarray) -> np.ndarray:
        x_NF = x_NF.copy()
        x_NF[:, self._logarithmic] = np.log(np.maximum(x_NF[:, self._logarithmic], 1e-30))
        return x_NF


def _layers(model: DhenConfig) -> list[Description]:
    """Each layer; of modules how many of each kind, their settings averaged over those of the kind."""
    found = []
    for layer in model.layers:
        each = Description()
        _take("", layer.model_dump(exclude={"modules", "ensemble"}), each)
        each.shares[f"ensemble={layer.ensemble.kind}"] = 1.0
        _take("ensemble", layer.ensemble.model_dump(exclude={"kind"}), each)
        by_kind: dict[str, list[Description]] = {}
        for block in layer.modules:
            settings = Description()
            _take("", block.model_dump(exclude={"kind"}), settings)
            by_kind.setdefault(block.kind, []).append(settings)
        for kind, blocks in by_kind.items():
            each.shares[kind] = len(blocks)
            _average(kind, blocks, each)
        found.append(each)
    return found


def _take(prefix: str, values: Mapping[str, Any], into: Description) -> None:
    """Numbers as sizes, lists of widths as their sum and length, what is within as itself, others as shares."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, (bool, int, float)):
            into.sizes[name] = float(value)
        elif isinstance(value, Mapping):
            _take(name, value, into)
        elif isinstance(value, (tuple, list)) and all(isinstance(each, (int, float)) for each in value):
            into.sizes[f"{name}.widths"] = float(sum(value))
            into.sizes[f"{name}.length"] = float(len(value))
        else:
            into.shares[f"{name}={value}"] = 1.0


def _average(prefix: str, described: Sequence[Description], into: Description) -> None:
    for key, values in _gathered(each.shares for each in described).items():
        into.shares[f"{prefix}.{key}"] = sum(values) / len(described)
    for key, values in _gathered(each.sizes for each in described).items():
        into.sizes[f"{prefix}.{key}"] = sum(values) / len(values)


def _gathered(found: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    gathered: dict[str, list[float]] = {}
    for each in found:
        for key, value in each.items():
            gathered.setdefault(key, []).append(value)
    return gathered
