"""What a ranker sees of a candidate: numbers of the decoded network, its cost and how it is trained.

The numbers describe the network, not the point: points that decode to the same network have the same features, the
order of modules and settings of absent modules have none. Shares (how many attention modules a layer has) are 0
where there is nothing; sizes (heads of attention) are the average of the other candidates where there is nothing.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dhen.config import DhenConfig
from search.samplers.static_cost import PricedCandidate

LOG_FROM_RATIO = 4.0
"""Sizes that are all positive and differ by this factor or more are compared by their logarithms: an assumption,
not measured apart."""
SMALLEST_DEVIATION = 1e-9
"""Deviation up to which a column counts as the same for all candidates: an assumption, the size of rounding
errors."""
SAME_DECIMALS = 6
"""Standardised columns that are equal to so many decimals count as one: an assumption, not measured apart."""
SMALLEST_SIZE = 1e-30
"""Size in place of zero, of which there is no logarithm: an assumption, below any size there is."""
DESCRIBED_APART = ("layers", "members", "members_from")
"""Fields of a network that `describe` takes by themselves."""


@dataclass(frozen=True)
class Description:
    """Named numbers of one candidate."""

    shares: dict[str, float] = field(default_factory=dict)
    """How many there are of a thing; 0 where there is none."""
    sizes: dict[str, float] = field(default_factory=dict)
    """How large a thing is; unknown where there is none."""


class KeptDescription:
    """A description in less memory, for one of thousands that are kept: without the network that it is of, and
    with names that it shares with others."""

    __slots__ = ("_names", "_numbers", "_shares")

    def __init__(self, description: Description) -> None:
        self._names = tuple(map(sys.intern, (*description.shares, *description.sizes)))
        self._numbers = array("d", (*description.shares.values(), *description.sizes.values()))
        self._shares = len(description.shares)

    def whole(self) -> Description:
        """The description."""
        pairs = list(zip(self._names, self._numbers, strict=True))
        return Description(dict(pairs[: self._shares]), dict(pairs[self._shares :]))


def describe(priced: PricedCandidate) -> Description:
    """A candidate in numbers: the first, the last and the average layer, the whole network, its training."""
    model = priced.candidate.model
    network = Description(sizes={"flops": max(priced.flops, 1.0), "parameters": max(priced.parameters, 1)})
    network.sizes.update(depth=len(model.layers), members=model.members, members_from=model.members_from)
    _take("model", {key: value for key, value in model if key not in DESCRIBED_APART}, network)
    _take("training", priced.candidate.training, network)
    layers = _layers(model)
    for name, selected in (("layers", layers), ("first", layers[:1]), ("last", layers[-1:])):
        _average(name, selected, network)
    return network


class Encoder:
    """An encoder of descriptions as standardised numbers, by the means and deviations of some of them."""

    def __init__(self, described: Sequence[Description]) -> None:
        """An encoder fit to `described`; columns that do not vary, or repeat another column, are left out."""
        self._shares = sorted({name for description in described for name in description.shares})
        self._sizes = sorted({name for description in described for name in description.sizes})
        x_NF = self._raw(described)
        low_F, high_F = np.nanmin(x_NF, axis=0), np.nanmax(x_NF, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._logarithmic = (low_F > 0) & (high_F / low_F >= LOG_FROM_RATIO)
        x_NF = self._scaled(x_NF)
        self._mean_F, self._deviation_F = np.nanmean(x_NF, axis=0), np.nanstd(x_NF, axis=0)
        self._kept = np.flatnonzero(self._deviation_F > SMALLEST_DEVIATION)
        _, first = np.unique(self.matrix(described).round(SAME_DECIMALS), axis=1, return_index=True)
        self._kept = self._kept[np.sort(first)]

    def matrix(self, described: Sequence[Description]) -> np.ndarray:
        """The matrix x_NF, a row per candidate."""
        x_NF = (self._scaled(self._raw(described)) - self._mean_F)[:, self._kept]
        standardised_NF: np.ndarray = np.nan_to_num(x_NF / self._deviation_F[self._kept])
        return standardised_NF

    def _raw(self, described: Sequence[Description]) -> np.ndarray:
        shares = [[description.shares.get(name, 0.0) for name in self._shares] for description in described]
        sizes = [[description.sizes.get(name, math.nan) for name in self._sizes] for description in described]
        return np.hstack([np.array(shares).reshape(len(described), -1), np.array(sizes)])

    def _scaled(self, x_NF: np.ndarray) -> np.ndarray:
        x_NF = x_NF.copy()
        x_NF[:, self._logarithmic] = np.log(np.maximum(x_NF[:, self._logarithmic], SMALLEST_SIZE))
        return x_NF


def _layers(model: DhenConfig) -> list[Description]:
    """A description of each layer: how many modules of each kind, their settings averaged over the kind."""
    layers = []
    for layer in model.layers:
        description = Description()
        _take("", layer.model_dump(exclude={"modules", "ensemble"}), description)
        description.shares[f"ensemble={layer.ensemble.kind}"] = 1.0
        _take("ensemble", layer.ensemble.model_dump(exclude={"kind"}), description)
        by_kind: dict[str, list[Description]] = {}
        for module in layer.modules:
            settings = Description()
            _take("", module.model_dump(exclude={"kind"}), settings)
            by_kind.setdefault(module.kind, []).append(settings)
        for kind, module_settings in by_kind.items():
            description.shares[kind] = len(module_settings)
            _average(kind, module_settings, description)
        layers.append(description)
    return layers


def _take(prefix: str, values: Mapping[str, Any], into: Description) -> None:
    """Adds numbers as sizes, widths as their sum and length, nested values one by one, and others as shares."""
    for key, value in values.items():
        name = f"{prefix}.{key}"
        if isinstance(value, (bool, int, float)):
            into.sizes[name] = float(value)
        elif isinstance(value, Mapping):
            _take(name, value, into)
        elif isinstance(value, (tuple, list)) and all(isinstance(width, (int, float)) for width in value):
            into.sizes[f"{name}.widths"] = float(sum(value))
            into.sizes[f"{name}.length"] = float(len(value))
        else:
            into.shares[f"{name}={value}"] = 1.0


def _average(prefix: str, described: Sequence[Description], into: Description) -> None:
    for key, values in _gathered(layer.shares for layer in described).items():
        into.shares[f"{prefix}.{key}"] = sum(values) / len(described)
    for key, values in _gathered(layer.sizes for layer in described).items():
        into.sizes[f"{prefix}.{key}"] = sum(values) / len(values)


def _gathered(named_numbers: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    gathered: dict[str, list[float]] = {}
    for numbers in named_numbers:
        for key, value in numbers.items():
            gathered.setdefault(key, []).append(value)
    return gathered
