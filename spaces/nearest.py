"""The point of a space that comes nearest to a model and its training, which may lie outside the space.

A study begins its search with its tuned baseline in the space's terms, so that it is not behind it: an
AdvancedDLRM is one layer of the module `dlrm`, which is pairwise dots beside the flattened embeddings and an
MLP, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations_with_replacement, product
from typing import Any

from dhen.advanced_dlrm import AdvancedDlrmConfig
from dhen.blocks import BLOCKS, BlockConfig
from dhen.blocks.dlrm import DlrmConfig
from dhen.blocks.mlp import MlpConfig
from dhen.config import DhenConfig, LayerConfig, ModelConfig
from dhen.errors import UserError
from dhen.values import parse
from spaces.axes import Axis, ChoiceAxis, Scalar, is_number
from spaces.space import LAYER_FIELDS, NONE, Point, Space


def nearest_point(space: Space, model: ModelConfig, training: Mapping[str, Any]) -> Point:
    """The point of the space that comes nearest to a model that trains with these settings.

    Ordered axes have the nearest of their values, others the same value or else their first. If the space has
    no recipe for the model's layers, those of its own first start point take their place; without one they are
    left open. Axes that wait for the tuning stage are left out, since they keep their first value until then.
    """
    settings: Point = {}
    for key, axis in space.model_axes.items():
        if key in type(model).model_fields:  # an AdvancedDLRM has neither head nor members
            settings |= _near(axis, getattr(model, key))
    for key, axis in space.training_axes.items():
        settings |= _near(axis, training.get(key))
    layers = _recipe(space, model)
    point = first_values(space) | layers | settings if layers is not None else _own_start(space) | settings
    if layers is not None:
        try:
            space.decode(point)
        except UserError:  # attention, say, stands at some lengths of embeddings alone
            point = _own_start(space) | settings
    return {name: value for name, value in point.items() if name not in space.left_for_tuning}


def first_values(space: Space) -> Point:
    """The point with the first value of every axis."""
    return {axis.name: axis.first for axis in space.axes}


def nearest_label(axis: Axis, value: Any) -> Scalar:
    """The axis's value that is nearest to this one, as it stands in a point; the first if none is near."""
    if not isinstance(axis, ChoiceAxis):
        if not is_number(value):
            return axis.low
        inside: float = min(max(value, axis.low), axis.high)
        last = (axis.high - axis.low) // axis.step
        if axis.whole:
            return int(axis.low + axis.step * min(round((inside - axis.low) / axis.step), last))
        return inside
    if value in axis.values:
        return axis.encode(value)
    if is_number(value):
        numbers = [other for other in axis.values if is_number(other)]
        # lengths, widths and rates differ by ratios; a dropout may be 0
        scale = math.log if min([value, *numbers]) > 0 else float
        near = min(numbers, key=lambda other: abs(scale(other) - scale(value)), default=axis.values[0])
        return axis.encode(near)
    if _is_widths(value):
        lists = [other for other in axis.values if _is_widths(other)]
        return axis.encode(min(lists, key=lambda other: _apart(other, value), default=axis.values[0]))
    return axis.first


def _near(axis: Axis, value: Any) -> Point:
    return {axis.name: nearest_label(axis, value)} if axis.size > 1 else {}


def _is_widths(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(is_number, value))


def _apart(widths: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, float]:
    """How far apart the widths of two MLPs are: in number first, then in what one lacks of the other."""
    shares = (abs(a - b) / (abs(a) + abs(b) or 1) for a, b in zip(widths, others, strict=False))
    return abs(len(widths) - len(others)), sum(shares)


def _own_start(space: Space) -> Point:
    return dict(space.config.start[0]) if space.config.start else {}


def _recipe(space: Space, model: ModelConfig) -> Point | None:
    """Depth, modules and settings of the layers; None if the space has not got the modules, or one recipe for
    layers that differ."""
    layers, slots = _layers(space, model), space.config.slots
    modules = [[block.kind for block in layer.modules] for layer in layers]
    unknown = {kind for kinds in modules for kind in kinds} - set(space.config.modules)
    if not layers or unknown or max(map(len, modules)) > slots:
        return None
    if space.config.layers == "shared" and any(layer != layers[0] for layer in layers):
        return None
    point = _near(space.depth, len(layers))
    for axes, layer in zip(space.layer_axes.values(), layers, strict=False):
        point |= _layer(space, axes, layer, model.dropout)
    return point


def _layers(space: Space, model: ModelConfig) -> tuple[LayerConfig, ...]:
    """The model's layers; those of an AdvancedDLRM as the space may have them, none if it has not."""
    if isinstance(model, DhenConfig):
        return model.layers
    assert isinstance(model, AdvancedDlrmConfig), model
    # as many numbers as the MLP ends with go on to the head
    out = max(1, round(model.mlp[-1] / model.embedding_dim))
    for block in (DlrmConfig(mlp=model.mlp, rank=model.rank), MlpConfig(mlp=model.mlp)):
        if block.kind in space.config.modules:
            return (LayerConfig(modules=(block,), out_embeddings=out, norm="none", shortcut=False),)
    return ()


def _layer(space: Space, axes: Mapping[str, Axis], layer: LayerConfig, dropout: float) -> Point:
    point: Point = {}
    for slot in range(space.config.slots):
        kind = layer.modules[slot].kind if slot < len(layer.modules) else NONE
        point |= _near(axes[f"block{slot}"], kind)
    for block in layer.modules:
        for key in space.config.modules[block.kind]:
            axis, value = axes[f"{block.kind}.{key}"], getattr(block, key)
            has_none = isinstance(axis, ChoiceAxis) and None in axis.values
            if key == "dropout" and value is None and not has_none:
                value = dropout  # which a module does not repeat
            point |= _near(axis, value)
    for key in LAYER_FIELDS:
        value = layer.ensemble.kind if key == "ensemble" else getattr(layer, key)
        point |= _near(axes[key], value)
    return point


# How large a space is: distinct architectures, counted exactly, and the real-valued axes beside them.


@dataclass(frozen=True, kw_only=True)
class SpaceSize:
    """What there is to search."""

    architectures: float
    """Distinct model configurations: module sets without order, an ensemble of one module counted once,
    settings of absent modules not counted. Infinite if a model setting is real-valued."""
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
    dropouts = dropout.values if isinstance(dropout, ChoiceAxis) else (0.0,)
    others = {
        name: axis for name, axis in space.model_axes.items() if axis is not dropout or axis.size == math.inf
    }
    training = list(space.training_axes.values())
    # settings outside the layers: one member alone has one place to part
    constant = ChoiceAxis(name="members", values=(1,))
    members, parting = others.pop("members", constant), others.pop("members_from", constant)
    alone = int((min(members.values) if isinstance(members, ChoiceAxis) else members.low) == 1)
    other_settings = math.prod(axis.size for axis in others.values())
    counts = list[tuple[float, float]]()
    for model_dropout in dropouts:
        layers = [_layer_count(space, axes, model_dropout) for axes in space.layer_axes.values()]
        for depth in _values(space.depth):
            stacks = layers[0] if space.config.layers == "shared" else math.prod(layers[:depth])
            places = len({min(layer, depth) for layer in _values(parting)})
            counts.append((stacks, other_settings * ((members.size - alone) * places + alone)))
    return SpaceSize(
        architectures=math.inf
        if any(models == math.inf for _, models in counts)
        else sum(stacks * models for stacks, models in counts),
        training_choices=math.prod(axis.size for axis in training if axis.size < math.inf),
        real_axes=sum(axis.size == math.inf for axis in training),
        axes=len(space.axes),
    )


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
    norm = axes["norm"]
    without = int(isinstance(norm, ChoiceAxis) and NONE in norm.values)  # which has only one placement
    return count * others * ((norm.size - without) * axes["norm_placement"].size + without)


def _module_count(kind: str, axes: Mapping[str, Axis], model_dropout: float) -> float:
    """Number of distinct settings of a module; those that mean nothing beside others are not counted."""
    block = BLOCKS[kind]
    if block.uses is BlockConfig.uses:
        return math.prod(_setting_count(key, axis, model_dropout) for key, axis in axes.items())
    apart = {key: axis for key, axis in axes.items() if key == "dropout"}
    others = {
        key: axis.values if isinstance(axis, ChoiceAxis) else _values(axis)
        for key, axis in axes.items()
        if key not in apart
    }
    distinct = {
        parse(block, dict(zip(others, values, strict=True)), f"space: module {kind}")
        for values in product(*others.values())
    }
    return len(distinct) * math.prod(_setting_count(key, axis, model_dropout) for key, axis in apart.items())


def _setting_count(key: str, axis: Axis, model_dropout: float) -> float:
    """Number of values of a module's setting; a dropout equal to the model's is the same as none of its own."""
    if key == "dropout" and isinstance(axis, ChoiceAxis) and {None, model_dropout} <= set(axis.values):
        return axis.size - 1
    return axis.size


def _values(axis: Axis) -> list[int]:
    if isinstance(axis, ChoiceAxis):
        return [int(value) for value in axis.values]
    return list(range(int(axis.low), int(axis.high) + 1, axis.step))
