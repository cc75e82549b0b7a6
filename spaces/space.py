"""Space: what may vary in a DHEN and its training; points of it, and the configurations they stand for.

The encoding has one shape: every layer has the same slots for interaction modules (`none` leaves a slot
empty, but for the first), and every axis is sampled in every trial, used or not. Points that decode to
the same network are recognised by the fingerprint of the configuration. `layers: shared` gives all
layers one recipe, as the paper stacks them; `layers: each` gives each its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dhen.blocks import BLOCKS, DropoutBlockConfig
from dhen.config import DhenConfig, LayerConfig
from dhen.ensembles import ENSEMBLES
from dhen.errors import UserError, unknown_name
from dhen.model import parse_model
from dhen.schema import FeatureSchema
from dhen.values import Value, fingerprint, load_yaml, parse
from spaces.axes import Axis, ChoiceAxis, Scalar, random_value, read_axis

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


Point = dict[str, Scalar]
NONE = "none"
MOST_LAYERS = 1000
"""The deepest that a space may be: what `plan --sweep` draws, too."""
LAYER_FIELDS = ("ensemble", "out_embeddings", "raw_numeric", "norm", "norm_placement", "shortcut")
MODEL_FIELDS = (
    "embedding_dim",
    "table_dim_exponent",
    "capacity_share",
    "buckets",
    "numeric_mlp",
    "head",
    "dropout",
    "members",
    "members_from",
)


class SpaceConfig(Value):
    """A space as YAML has it. Every leaf is a list (a choice), a range, or a constant."""

    description: str = ""
    """What the space is for, in a sentence."""
    layers: Literal["shared", "each"] = "shared"
    """shared: all layers have one recipe (modules and settings of a layer), as in the paper; each: every layer
    has its own."""
    depth: Any = Field(default=[1, 2, 3])
    """Number of layers."""
    slots: int = Field(default=3, gt=0, le=16)
    """Largest number of interaction modules per layer; the same kind may fill several slots."""
    modules: dict[str, dict[str, Any]] = Field(min_length=1)
    """Interaction modules that may be used, by name, each with its settings, which are axes; settings left
    out keep their defaults."""
    ensemble: Any = Field(default=["concat", "sum", "weighted_sum"])
    """How a layer joins its modules."""
    out_embeddings: Any = Field(default=[4, 8])
    """Number of embeddings that each module puts out."""
    raw_numeric: Any = Field(default=[False, True])
    """Whether the modules see the raw numeric inputs too."""
    # this and the next two are left out of plain data if they are the paper's: spaces of before they were
    # fields keep their fingerprint
    norm: Any = Field(default="layer", exclude_if=lambda leaf: leaf == "layer")
    """Normalization in layers."""
    norm_placement: Any = Field(default="post", exclude_if=lambda leaf: leaf == "post")
    """Place of the norm in layers."""
    shortcut: Any = Field(default=True, exclude_if=lambda leaf: leaf is True)
    """Whether layers have a shortcut."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Axes of the model, by key: embedding_dim, table_dim_exponent, capacity_share, buckets, numeric_mlp, head,
    dropout, members, members_from."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Axes of the training settings, by any key of a training configuration."""
    tuning: tuple[str, ...] = Field(default=(), exclude_if=lambda names: not names)
    """Settings that keep their first value until the tuning stage of a study (`tune`) varies them: keys of
    `model`, `training.KEY`, or `KIND.SETTING` of a module."""
    start: tuple[dict[str, Any], ...] = ()
    """Points to try right after the tuned baseline's own, as mappings of axis names to values; axes left out are
    sampled."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a point stands for."""

    model: DhenConfig
    training: dict[str, Any]
    """Training settings that the space decides."""


class Space:
    """A space ready to be sampled."""

    def __init__(self, name: str, config: SpaceConfig) -> None:
        """Raises UserError if a name or a value is wrong; `load_space` also checks that some point decodes."""
        self.name = name
        self.config = config
        self._check_names()
        self._read_axes()
        axes, settings = {axis.name: axis for axis in self.axes}, dict(self._by_setting())
        for point in config.start:
            for key, value in point.items():
                if key not in axes:
                    raise unknown_name("axis of a start point", key, axes)
                axes[key].decode(value)
        for key in config.tuning:
            if key not in settings:
                raise unknown_name("setting under `tuning`", key, settings)
        self.left_for_tuning: Point = {
            axis.name: axis.first
            for name, axis in self._by_setting()
            if name in config.tuning and axis.size > 1
        }
        """The axes of `tuning`, with the values that they keep until the tuning stage."""

    def _read_axes(self) -> None:
        config = self.config
        self.depth = read_axis("depth", config.depth)
        _check_layers(self.depth, least=1)
        self.max_depth = int(
            max(self.depth.values) if isinstance(self.depth, ChoiceAxis) else self.depth.high
        )
        self.model_axes = {key: read_axis(key, spec) for key, spec in config.model.items()}
        if "members_from" in self.model_axes:
            _check_layers(self.model_axes["members_from"], least=0)
        self.training_axes = {
            key: read_axis(f"training.{key}", spec) for key, spec in config.training.items()
        }
        self.layer_axes = dict[str, dict[str, Axis]]()
        """By recipe its axes by field of a layer: slots, ensemble and the rest, then each kind's settings."""
        kinds = list(config.modules)
        for prefix in self._prefixes():
            specs = {f"block{slot}": [NONE, *kinds] if slot else kinds for slot in range(config.slots)}
            specs |= {key: getattr(config, key) for key in LAYER_FIELDS}
            for kind, settings in config.modules.items():
                specs |= {f"{kind}.{key}": spec for key, spec in settings.items()}
            self.layer_axes[prefix] = {key: read_axis(f"{prefix}.{key}", spec) for key, spec in specs.items()}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes with more than one value, in the order of sampling."""
        layers = (axis for axes in self.layer_axes.values() for axis in axes.values())
        all_axes = (self.depth, *layers, *self.model_axes.values(), *self.training_axes.values())
        return tuple(axis for axis in all_axes if axis.size > 1)

    def start_point(self, index: int, training: Mapping[str, Any]) -> Point:
        """Values of the space's start point of this index, as far as the space names them; empty past the last.

        `training` are settings that have worked on this log (the tuned baseline's): a start point that
        leaves them open takes them.
        """
        if index >= len(self.config.start):
            return {}
        proven = {
            axis.name: training[key]
            for key, axis in self.training_axes.items()
            if axis.size > 1 and axis.has(training.get(key)) and axis.name not in self.left_for_tuning
        }
        return proven | self.config.start[index]

    def with_first(self, training: Mapping[str, Any]) -> dict[str, Any]:
        """Returns these training settings if the space has them; of an axis that has another value its first
        one."""
        axes = self.training_axes.items()
        return {
            key: training[key] if axis.has(training[key]) else axis.decode(axis.first) for key, axis in axes
        }

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that varies; a study keeps to one space."""
        return fingerprint(self.config.to_dict())

    def widen(self, setting: str, value: Any) -> None:
        """Adds a value beyond an end of a setting's axis, in every layer that has it; of a range, the new end.

        Points keep their meaning: values stay as they are, and the first one stays the first. All who hold the
        space have the wider one.

        Args:
            setting: name of the axis, `layer.KEY` for a setting of layers whatever their number.
            value: the value.

        Raises:
            UserError: if the space has no such axis, for a value that it cannot have, and for the depth if
                each layer has axes of its own, which points of before would lack.
        """
        data = self.config.to_dict()
        *outer, key = _place(setting)
        try:
            held = reduce(getitem, outer, data)
            spec = held[key]
            if isinstance(spec, dict):
                held[key] = spec | {"low": min(spec["low"], value), "high": max(spec["high"], value)}
            else:
                held[key] = [*spec, value]  # listed last
        except KeyError:
            raise unknown_name("axis", setting, [axis.name for axis in self.axes]) from None
        if setting == "depth" and self.config.layers == "each":
            raise UserError(f"space {self.name!r}: each layer has axes of its own, so its depth cannot grow.")
        self.config = parse(SpaceConfig, data, f"space {self.name!r}")
        self._read_axes()

    def sample(self, trial: BaseTrial) -> Point:
        """A point with the value that the trial suggests for every axis."""
        return {axis.name: axis.sample(trial) for axis in self.axes}

    def for_optuna(self, point: Point) -> Point:
        """What the values of a point, or of a part of one, are to Optuna."""
        return {axis.name: axis.for_optuna(point[axis.name]) for axis in self.axes if axis.name in point}

    def random_point(self, rng: random.Random) -> Point:
        """A point with every axis drawn evenly."""
        return {axis.name: random_value(axis, rng) for axis in self.axes}

    def decode(self, point: Point) -> Candidate:
        """The configuration that a point stands for.

        Raises:
            UserError: saying which values do not go together, or that the point is of another space.
        """
        if differing := sorted(set(point) ^ {axis.name for axis in self.axes}):
            raise UserError(f"the point is not of space {self.name!r}: {', '.join(differing)} differ.")
        values = {key: _value(axis, point) for key, axis in self.model_axes.items()}
        depth = int(_value(self.depth, point))
        layers = [self._decode_layer(prefix, point) for prefix in self._prefixes()[:depth]]
        if self.config.layers == "shared":
            layers *= depth
        if "members_from" in values:  # after the last layer only heads differ
            values["members_from"] = min(values["members_from"], depth)
        model = parse_model({"family": "dhen", **values, "layers": layers}, f"a point of space {self.name!r}")
        assert isinstance(model, DhenConfig)
        training = {key: _value(axis, point) for key, axis in self.training_axes.items()}
        return Candidate(model=model, training=training)

    def encode(self, candidate: Candidate) -> Point:
        """A point that decodes to this candidate; axes that the candidate does not use take their first value.

        Raises:
            UserError: if the candidate lies outside this space.
        """
        point: Point = {axis.name: axis.first for axis in self.axes}
        layers = candidate.model.layers
        point |= _encoded(self.depth, len(layers))
        for prefix, layer in zip(self._prefixes(), layers, strict=False):
            point |= self._encode_layer(prefix, layer, candidate.model.dropout)
        for key, axis in self.model_axes.items():
            if key == "members_from":
                point |= _encoded_parting(axis, candidate.model)
            else:
                point |= _encoded(axis, getattr(candidate.model, key))
        for key, axis in self.training_axes.items():
            point |= _encoded(axis, candidate.training[key])
        if self.decode(point) != candidate:
            raise UserError(f"the configuration lies outside space {self.name!r}.")
        return point

    def _prefixes(self) -> list[str]:
        if self.config.layers == "shared":
            return ["layer"]
        return [f"layer{index}" for index in range(self.max_depth)]

    def _decode_layer(self, prefix: str, point: Point) -> dict[str, Any]:
        axes = self.layer_axes[prefix]
        kinds = [_value(axes[f"block{slot}"], point) for slot in range(self.config.slots)]
        modules = [
            {"kind": kind} | {key: _value(axes[f"{kind}.{key}"], point) for key in self.config.modules[kind]}
            for kind in kinds
            if kind != NONE
        ]
        return {"modules": modules} | {key: _value(axes[key], point) for key in LAYER_FIELDS}

    def _encode_layer(self, prefix: str, layer: LayerConfig, model_dropout: float) -> Point:
        axes = self.layer_axes[prefix]
        point: Point = {}
        if len(layer.modules) > self.config.slots:
            raise UserError(f"{len(layer.modules)} modules in a layer; this space has {self.config.slots}.")
        for slot, block in enumerate(layer.modules):
            point |= _encoded(axes[f"block{slot}"], block.kind)
            for key in filter(block.uses, self.config.modules.get(block.kind, {})):
                axis, value = axes[f"{block.kind}.{key}"], getattr(block, key)
                if key == "dropout" and value is None and not axis.has(value):
                    value = model_dropout  # which a module does not repeat
                point |= _encoded(axis, value)
        ensemble = axes["ensemble"]
        if len(layer.modules) > 1:
            point |= _encoded(ensemble, layer.ensemble.kind)
        for key in LAYER_FIELDS[1:]:
            if key != "norm_placement" or layer.norm != NONE:  # a norm that is none has no place
                point |= _encoded(axes[key], getattr(layer, key))
        return point

    def _check_names(self) -> None:
        """Checks that kinds, their settings, ensembles and model fields exist."""
        for kind, settings in self.config.modules.items():
            if kind not in BLOCKS:
                raise unknown_name("interaction module", kind, BLOCKS)
            fields = set(BLOCKS[kind].model_fields) - {"kind"}
            for key in settings:
                if key == "dropout" and key not in fields:
                    having = (name for name, block in BLOCKS.items() if issubclass(block, DropoutBlockConfig))
                    raise UserError(
                        f"interaction module {kind!r} has no dropout in it, so there is none to choose; those "
                        f"that have: {', '.join(sorted(having))}."
                    )
                if key not in fields:
                    raise unknown_name(f"setting of interaction module {kind!r}", key, fields)
        for key in self.config.model:
            if key not in MODEL_FIELDS:
                raise unknown_name("model field", key, MODEL_FIELDS)
        ensembles = self.config.ensemble
        for kind in ensembles if isinstance(ensembles, list) else [ensembles]:
            if not isinstance(kind, str) or kind not in ENSEMBLES:
                raise unknown_name("ensemble", str(kind), ENSEMBLES)

    def _by_setting(self) -> Iterator[tuple[str, Axis]]:
        """Axes by the names that `tuning` has for them; a module's setting comes once for each recipe."""
        yield from self.model_axes.items()
        yield from ((f"training.{key}", axis) for key, axis in self.training_axes.items())
        for axes in self.layer_axes.values():
            yield from ((key, axis) for key, axis in axes.items() if "." in key)


def _place(setting: str) -> tuple[str, ...]:
    """Where a space's plain data has the axis of this name: the keys on the way."""
    part, *rest = setting.split(".")
    if part == "layer":
        return tuple(rest) if len(rest) == 1 else ("modules", *rest)
    return (part, *rest) if part in ("depth", "training") else ("model", part, *rest)


def _check_layers(axis: Axis, least: int) -> None:
    """Checks that the axis's values are numbers of layers."""
    for value in axis.values if isinstance(axis, ChoiceAxis) else (axis.low, axis.high):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_LAYERS:
            raise UserError(
                f"space: {axis.name} is a whole number of layers, {least} or more, {MOST_LAYERS:,} at most; "
                f"received {value!r}."
            )


def _value(axis: Axis, point: Point) -> Any:
    """The axis's value at a point; the constant if the axis has only one value."""
    return axis.decode(point.get(axis.name, axis.first))


def _encoded(axis: Axis, value: Any) -> Point:
    label = axis.encode(value)  # of a constant too: another value lies outside
    return {axis.name: label} if axis.size > 1 else {}


def _encoded_parting(axis: Axis, model: DhenConfig) -> Point:
    """The value of `members_from`: none for one member; after the last layer the next larger value will do."""
    behind = model.members_from == len(model.layers)
    if model.members == 1:
        return {}
    if behind and isinstance(axis, ChoiceAxis) and model.members_from not in axis.values:
        return _encoded(
            axis, next((value for value in axis.values if value > model.members_from), model.members_from)
        )
    return _encoded(axis, model.members_from)


# Named spaces (`spaces/catalog/*.yaml`) and a user's own YAML file beside them.

PROBES = 64
"""Random points tried before a space is called impossible."""


def catalog() -> dict[str, SpaceConfig]:
    """The named spaces."""
    with resources.as_file(resources.files("spaces") / "catalog") as folder:
        files = sorted(Path(folder).glob("*.yaml"))
        return {file.stem: parse(SpaceConfig, load_yaml(file), file.name) for file in files}


def load_space(name: str, features: FeatureSchema | None = None) -> Space:
    """A space by its name in the catalog or by the path of a YAML file.

    If the inputs of a log are given, axes that change nothing on that log are constants.

    Raises:
        UserError: when there is no such space, a key or value is wrong, or no point of it decodes.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        space = _read(path)
    elif name in (named := catalog()):
        space = Space(name, named[name])
    elif path.exists():
        space = _read(path)
    else:
        raise unknown_name("space", name, named)
    if features is not None:
        space = Space(space.name, _with_effect(space, features))
    rng, reason = random.Random(0), ""
    for _ in range(PROBES):
        try:
            space.decode(space.random_point(rng))
        except UserError as error:
            reason = str(error)
        else:
            return space
    raise UserError(f"space {space.name!r} is impossible: no point of it gives a model. {reason}")


def _with_effect(space: Space, features: FeatureSchema) -> SpaceConfig:
    """The space in which settings of inputs that the log lacks keep their first value: they change no network."""
    acts_on = {
        "buckets": features.bucketed,
        "numeric_mlp": features.numeric,
        "table_dim_exponent": features.tables,
        "capacity_share": features.growing,
    }
    idle = [key for key in space.config.model if key in acts_on and not acts_on[key]]
    first = {key: [space.model_axes[key].decode(space.model_axes[key].first)] for key in idle}
    raw = space.config.raw_numeric
    if not features.numeric and isinstance(raw, list):
        raw = raw[:1]
        idle.append("raw_numeric")
    start = tuple(
        {name: value for name, value in point.items() if name.rpartition(".")[2] not in idle}
        for point in space.config.start
    )
    return space.config.replace(model=space.config.model | first, start=start, raw_numeric=raw)


def _read(path: Path) -> Space:
    config = parse(SpaceConfig, load_yaml(path), str(path))
    try:
        return Space(path.stem, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
