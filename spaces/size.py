"""How large a space is: distinct architectures, counted exactly, and the real-valued axes beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations_with_replacement, product
from typing import Any

from dhen.blocks import BLOCKS, BlockConfig
from dhen.values import parse
from spaces.axes import Axis, Choice
from spaces.space import NONE, Space


@dataclass(frozen=True, kw_only=True)
class SpaceSize:
    """What there is to search."""

    architectures: float
    """Distinct model configurations: module sets without order, an ensemble of one module counted once,
    settings of absent modules not counted. Infinite where a model setting is real-valued."""
    training_choices: float
    """Combinations of the discrete training settings."""
    real_axes: int
    """Real-valued axes of training."""
    axes: int

    def __str__(self) -> str:
        real = f" x {self.real_axes} real-valued training axes" if self.real_axes else ""
        choices = f" x {self.training_choices:,.0f} training settings" if self.training_choices > 1 else ""
        exact = Decimal(self.architectures)  # a deep space has more than a float can hold
        count = f"{exact:.3g}" if 1e6 <= exact < math.inf else f"{exact:,.0f}" if exact < 1e6 else "inf"
        return f"{count} architectures{choices}{real} ({self.axes} axes)"


def space_size(space: Space) -> SpaceSize:
    """Counts the architectures and the training settings of a space."""
    dropout = space.model_axes.get("dropout")
    dropouts = dropout.values if isinstance(dropout, Choice) else (0.0,)
    others = {
        name: axis for name, axis in space.model_axes.items() if axis is not dropout or axis.size == math.inf
    }
    training = list(space.training_axes.values())
    counts = [
        (stacks, _model_count(others, depth))
        for model_dropout in dropouts
        for depth, stacks in _stack_counts(space, model_dropout)
    ]
    return SpaceSize(
        architectures=math.inf
        if any(models == math.inf for _, models in counts)
        else sum(stacks * models for stacks, models in counts),
        training_choices=math.prod(axis.size for axis in training if axis.size < math.inf),
        real_axes=sum(axis.size == math.inf for axis in training),
        axes=len(space.axes),
    )


def _model_count(axes: Mapping[str, Axis], depth: int) -> float:
    """Distinct settings outside the layers of a model this deep; one member alone has one place to part."""
    constant = Choice(name="members", values=(1,))
    members, parting = axes.get("members", constant), axes.get("members_from", constant)
    parting_layers = len({min(layer, depth) for layer in _values(parting)})
    low = min(members.values) if isinstance(members, Choice) else members.low
    alone = int(low == 1)
    others = math.prod(axis.size for name, axis in axes.items() if name not in ("members", "members_from"))
    return others * ((members.size - alone) * parting_layers + alone)


def _stack_counts(space: Space, model_dropout: float) -> Iterator[tuple[int, float]]:
    """Each depth, and the number of distinct stacks of so many layers in models with this dropout."""
    layers = [_layer_count(space, axes, model_dropout) for axes in space.layer_axes.values()]
    shared = space.config.layers == "shared"
    for depth in _values(space.depth):
        yield depth, layers[0] if shared else math.prod(layers[:depth])


def _layer_count(space: Space, axes: dict[str, Axis], model_dropout: float) -> float:
    """Number of distinct layers: the sum over all multisets of at most `slots` kinds."""
    settings = {
        kind: _module_count(kind, {key: axes[f"{kind}.{key}"] for key in keys}, model_dropout)
        for kind, keys in space.config.modules.items()
    }
    ensembles = axes["ensemble"].size
    count = sum(
        math.prod(settings[kind] for kind in set(kinds)) * (ensembles if n > 1 else 1)
        for n in range(1, space.config.slots + 1)
        for kinds in combinations_with_replacement(settings, n)
    )
    others = math.prod(axes[key].size for key in ("out_embeddings", "raw_numeric", "shortcut"))
    return count * others * _norm_count(axes["norm"], axes["norm_placement"])


def _module_count(kind: str, axes: Mapping[str, Axis], model_dropout: float) -> float:
    """Number of distinct settings of a module; those that mean nothing beside others are not counted."""
    block = BLOCKS[kind]
    if block.uses is BlockConfig.uses:
        return math.prod(_setting_count(key, axis, model_dropout) for key, axis in axes.items())
    apart = {key: axis for key, axis in axes.items() if key == "dropout"}
    others = [(key, _every_value(axis)) for key, axis in axes.items() if key not in apart]
    combined = product(*(values for _, values in others))
    names = [key for key, _ in others]
    distinct = {
        parse(block, dict(zip(names, values, strict=True)), f"space: module {kind}") for values in combined
    }
    return len(distinct) * math.prod(_setting_count(key, axis, model_dropout) for key, axis in apart.items())


def _every_value(axis: Axis) -> list[Any]:
    return list(axis.values) if isinstance(axis, Choice) else _values(axis)


def _setting_count(key: str, axis: Axis, model_dropout: float) -> float:
    """Number of values of a module's setting; a dropout equal to the model's is the same as none of its own."""
    if key == "dropout" and isinstance(axis, Choice) and {None, model_dropout} <= set(axis.values):
        return axis.size - 1
    return axis.size


def _norm_count(norm: Axis, placement: Axis) -> float:
    """Number of norms with their placements; `none` has only one placement."""
    without = int(isinstance(norm, Choice) and NONE in norm.values)
    return (norm.size - without) * placement.size + without


def _values(axis: Axis) -> list[int]:
    if isinstance(axis, Choice):
        return [int(value) for value in axis.values]
    return list(range(int(axis.low), int(axis.high) + 1, axis.step))
