"""The model families by name, and the doors through which the rest of the house uses them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from dhen.advanced_dlrm import AdvancedDlrm, AdvancedDlrmConfig, advanced_dlrm_cost, taped_advanced_dlrm
from dhen.config import DhenConfig, ModelConfig
from dhen.cost import Costs
from dhen.dhen_model import DhenModel, dhen_cost, taped_dhen
from dhen.errors import UserError, unknown_name
from dhen.schema import FeatureSchema
from dhen.tape import TapedSegment, TapeSetting
from dhen.values import load_yaml, parse

FAMILIES: dict[str, type[ModelConfig]] = {"dhen": DhenConfig, "advanced_dlrm": AdvancedDlrmConfig}


def build_model(config: ModelConfig, schema: FeatureSchema) -> nn.Module:
    """The torch module: forward maps a `FeatureBatch` to logit_B (of K members in training to logit_BK)."""
    if isinstance(config, DhenConfig):
        return DhenModel(config, schema)
    assert isinstance(config, AdvancedDlrmConfig), config
    return AdvancedDlrm(config, schema)


def model_cost(config: ModelConfig, schema: FeatureSchema) -> Costs:
    """FLOPs, parameters and bytes for one example, itemised (see `dhen.cost`)."""
    if isinstance(config, DhenConfig):
        return dhen_cost(config, schema)
    assert isinstance(config, AdvancedDlrmConfig), config
    return advanced_dlrm_cost(config, schema)


def taped_model(config: ModelConfig, schema: FeatureSchema, setting: TapeSetting) -> Iterator[TapedSegment]:
    """Yields the model's segments, first to last, each with its FLOPs and its tape (see `dhen.tape`)."""
    if isinstance(config, DhenConfig):
        return taped_dhen(config, schema, setting)
    assert isinstance(config, AdvancedDlrmConfig), config
    return iter(taped_advanced_dlrm(config, schema, setting))


def parse_model(data: object, source: str) -> ModelConfig:
    """A model config of any family from plain data; `family` defaults to `dhen`.

    Raises:
        UserError: naming `source`, the key and what would work.
    """
    if not isinstance(data, dict):
        raise UserError(f"{source}: expected a model configuration, received {type(data).__name__}.")
    family = data.get("family", "dhen")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{source}: {unknown_name('family', str(family), FAMILIES)}")
    return parse(FAMILIES[family], data, source)


def catalog() -> dict[str, dict[str, Any]]:
    """The models of the field that are shipped as configurations: name -> plain data."""
    folder = resources.files("dhen") / "catalog"
    with resources.as_file(folder) as path:
        return {file.stem: load_yaml(file) for file in sorted(Path(path).glob("*.yaml"))}


def named_model(name: str) -> ModelConfig:
    """A shipped configuration by name.

    Raises:
        UserError: listing the names there are.
    """
    models = catalog()
    if name not in models:
        raise unknown_name("model", name, models)
    return parse_model(models[name], name)
