"""The baseline that NE is relative to, with a small tuning budget of its own.

The first trial is the configuration as given; further ones vary learning rates, regularisation and, for a shipped
AdvancedDLRM, the embedding dimension and how buckets of numbers enter, drawn at random. Where there are buckets,
the second has them apart and is otherwise as given: what candidates may have for one axis, the baseline may have
too. The best on validation is the baseline.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhen.config import ModelConfig
from dhen.errors import UserError, unknown_name
from dhen.model import catalog, named_model, parse_model
from dhen.schema import FeatureSchema
from dhen.values import load_yaml, parse
from search.config import CONFIGURATION_KEYS, StudyConfig
from spaces.axes import random_value, read_axis
from spaces.space import Point
from trials.job import TrainingConfig

TRAINING_AXES: dict[str, Any] = {
    "learning_rate": {"low": 0.001, "high": 0.006, "log": True},
    "embedding_learning_rate": {"low": 0.03, "high": 0.3, "log": True},
    "embedding_decay": {"low": 1e-6, "high": 1e-3, "log": True},
}
MODEL_AXES: dict[str, Any] = {"embedding_dim": [8, 16, 32], "dropout": [0.0, 0.1]}
BUCKETS: dict[str, Any] = {"buckets": ["summed", "apart", "interpolated"]}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The baseline as given: a model and how it trains."""

    model: ModelConfig
    training: TrainingConfig
    incumbent: bool
    """Whether the architecture stays as it is: true for all but the shipped AdvancedDLRM."""
    bucketed: bool = False
    """Whether there are buckets of numbers to vary."""

    def at(self, point: Point) -> tuple[ModelConfig, TrainingConfig]:
        """The model and the training settings of a point; the empty one is the baseline as given."""
        model = {key: value for key, value in point.items() if not key.startswith("training.")}
        training = {key.removeprefix("training."): value for key, value in point.items() if key not in model}
        return (
            parse_model(self.model.to_dict() | model, "baseline"),
            parse(TrainingConfig, self.training.to_dict() | training, "baseline"),
        )

    def point(self, index: int, seed: int) -> Point:
        """The point of this index: 0 is the baseline as given, the others vary it."""
        if index == 0:
            return {}
        if index == 1 and self.bucketed:
            return {"buckets": "apart"}
        rng = random.Random(f"baseline {seed} {index}")
        axes = {f"training.{key}": spec for key, spec in TRAINING_AXES.items()}
        axes |= {} if self.incumbent else MODEL_AXES
        axes |= BUCKETS if self.bucketed else {}
        return {key: random_value(read_axis(key, spec), rng) for key, spec in axes.items()}


def read_baseline(config: StudyConfig, features: FeatureSchema | None = None) -> Baseline:
    """The study's baseline, with what may be varied of it on a log with these inputs.

    Raises:
        UserError: where `baseline` names neither a shipped model nor a readable configuration.
    """
    if config.baseline in catalog():
        model = named_model(config.baseline)
        incumbent = model.family != "advanced_dlrm"
        bucketed = not incumbent and features is not None and bool(features.bucketed)
        return Baseline(model=model, training=config.training, incumbent=incumbent, bucketed=bucketed)
    path = Path(config.baseline)
    if not path.exists():
        names = ", ".join(sorted(catalog()))
        raise UserError(
            f"baseline {config.baseline!r} is neither a shipped model ({names}) nor a configuration file."
        )
    model, training = read_configuration(path, config.training)
    if training.train_fraction != config.training.train_fraction:
        raise UserError(
            f"{path}: training.train_fraction is {training.train_fraction:g}, the study's "
            f"{config.training.train_fraction:g}: the baseline trains on the rows of its candidates. Leave it out "
            "there, and give it to the study: training.train_fraction=0.25."
        )
    return Baseline(model=model, training=training, incumbent=True)


def read_configuration(path: Path, defaults: TrainingConfig) -> tuple[ModelConfig, TrainingConfig]:
    """A model, or the name of a shipped one, and how it trains, from a YAML file with `model` and (optionally)
    `training`, or a model alone. What `plan` reads there too (`schema`) is left to it.

    Raises:
        UserError: naming the file and the key.
    """
    data = load_yaml(path)
    if isinstance(data, dict) and "model" in data:
        for unknown in sorted(map(str, set(data) - set(CONFIGURATION_KEYS))):
            raise UserError(f"{path}: {unknown_name('key', unknown, CONFIGURATION_KEYS)}")
        of_file = data["model"]
        model = named_model(of_file) if isinstance(of_file, str) else parse_model(of_file, f"{path}: model")
        settings = data.get("training") or {}
        if isinstance(settings, dict):  # `parse` refuses what is no mapping
            settings = defaults.to_dict() | settings
        return model, parse(TrainingConfig, settings, f"{path}: training")
    return parse_model(data, str(path)), defaults
