"""DHEN as a whole: features -> layers -> logit (paper, section 3, figures 1 and 2)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig
from dhen.cost import Costs, headline_flops, within
from dhen.features import FeatureProcessing, feature_cost, taped_features
from dhen.layer import DhenLayer, LayerShape, layer_cost, taped_layer
from dhen.linear import Linear, linear_tape
from dhen.parts import mlp, mlp_cost, mlp_tape
from dhen.schema import FeatureSchema
from dhen.segment import Setting, Taped
from dhen.tape import Tape


class DhenModel(nn.Module):
    """FeatureBatch -> logit_B."""

    def __init__(self, config: DhenConfig, schema: FeatureSchema) -> None:
        super().__init__()
        self.features = FeatureProcessing(config, schema)
        self.layers = nn.ModuleList(
            DhenLayer(layer, shape, dropout=config.dropout)
            for layer, shape in zip(config.layers, _shapes(config, schema), strict=True)
        )
        width = _head_width(config)
        self.head = mlp(width, config.head, dropout=config.dropout)
        self.logit = Linear((width, *config.head)[-1], 1)

    def forward(self, batch: FeatureBatch) -> Tensor:
        """The log odds of a click, one an example."""
        dtype = self.logit.weight.dtype
        x_BMD, raw_BK = self.features(batch, dtype), batch.numeric_BK.to(dtype)
        for layer in self.layers:
            x_BMD = layer(x_BMD, raw_BK)
        return self.logit(self.head(x_BMD.flatten(1))).squeeze(1)  # type: ignore[no-any-return]


def dhen_cost(config: DhenConfig, schema: FeatureSchema) -> Costs:
    """The cost of `DhenModel`, an item for each part of each layer."""
    layers = [
        row
        for index, (layer, shape) in enumerate(zip(config.layers, _shapes(config, schema), strict=True))
        for row in within(f"layer{index}", layer_cost(layer, shape))
    ]
    return (*within("features", feature_cost(config, schema)), *layers, *_head_cost(config))


def taped_dhen(config: DhenConfig, schema: FeatureSchema, setting: Setting) -> list[Taped]:
    """`DhenModel` as features, layers and head."""
    shapes = _shapes(config, schema)
    raw = any(shape.takes_raw(layer) for layer, shape in zip(config.layers, shapes, strict=True))
    layers = [
        taped_layer(layer, shape, config.dropout, setting)._replace(name=f"layer{index}")
        for index, (layer, shape) in enumerate(zip(config.layers, shapes, strict=True))
    ]
    return [taped_features(config, schema, setting, raw=raw), *layers, _taped_head(config, setting)]


def _taped_head(config: DhenConfig, setting: Setting) -> Taped:
    width = _head_width(config)
    tape = Tape(*setting)
    hidden = mlp_tape(tape, tape.input(width), width, config.head, dropout=config.dropout)
    logit = linear_tape(tape, hidden, (width, *config.head)[-1], 1)
    return Taped("head", headline_flops(_head_cost(config)), tape, logit)


def _head_cost(config: DhenConfig) -> Costs:
    return mlp_cost("head", _head_width(config), (*config.head, 1))[:-1]


def _shapes(config: DhenConfig, schema: FeatureSchema) -> list[LayerShape]:
    """What reaches each layer."""
    inputs = [schema.num_embeddings, *(layer.embeddings for layer in config.layers)]
    return [
        LayerShape(embeddings=m, dim=config.embedding_dim, numeric=len(schema.numeric))
        for m, _ in pairwise(inputs)
    ]


def _head_width(config: DhenConfig) -> int:
    return config.layers[-1].embeddings * config.embedding_dim
