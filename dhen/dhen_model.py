"""DHEN as a whole: features -> layers -> logit (paper, section 3, figures 1 and 2).

Shapes: B examples, M embeddings, D their dimension, V = M D numbers of all embeddings; K numeric inputs in
`raw_BK`, else K members.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.config import DhenConfig
from dhen.cost import Costs, headline_flops, within
from dhen.inputs.features import FeatureProcessing, feature_cost, taped_features
from dhen.inputs.table_dims import num_embeddings
from dhen.layer import DhenLayer, LayerShape, layer_cost, taped_layer
from dhen.members import MemberLinear, by_member, heads_cost, heads_tape, mean_logit, member_mlp
from dhen.memory.passes import row_bytes
from dhen.memory.segments import Setting, Taped
from dhen.memory.tape import FP32_BYTES, Tape
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import mlp, mlp_cost, mlp_tape, split_in_turn, undivided
from dhen.ops.split import How, RankGroup, how_split
from dhen.schema import FeatureSchema


class DhenModel(nn.Module):
    """FeatureBatch -> logit_B; with K members, in training, logit_BK."""

    def __init__(self, config: DhenConfig, schema: FeatureSchema) -> None:
        super().__init__()
        self.features = FeatureProcessing(config, schema)
        self.layers = nn.ModuleList(
            DhenLayer(layer, shape, dropout=config.dropout)
            for layer, shape in zip(config.layers, _shapes(config, schema), strict=True)
        )
        width, self.members, self.parted = _head_width(config), config.members, _part(config)
        self.head, self.logit = _heads(config, width, (width, *config.head)[-1])
        self.row_bytes = row_bytes(taped_dhen(config, schema, Setting(FP32_BYTES, "cpu")))
        """Bytes of each example in a forward pass in fp32 without gradients."""

    def forward(self, batch: FeatureBatch) -> Tensor:
        """The log odds of a click, one per example; in training one of each member, as each has its own loss."""
        dtype = self.logit.weight.dtype
        x_BMD, raw_BK = self.features(batch, dtype), batch.numeric_BK.to(dtype)
        for layer in self.layers:
            x_BMD = layer(x_BMD, raw_BK)
        return self.answer(x_BMD)

    def answer(self, x_BMD: Tensor) -> Tensor:
        """The heads' answer to what the last layer puts out, as `forward` returns it."""
        if self.members == 1:
            return self.logit(self.head(x_BMD.flatten(1))).squeeze(1)  # type: ignore[no-any-return]
        x_KBV = by_member(x_BMD.flatten(1), self.members, parted=self.parted)
        logit_BK = self.logit(self.head(x_KBV)).squeeze(2).T
        return logit_BK if self.training else mean_logit(logit_BK)

    def split(self, group: RankGroup) -> None:
        """Leaves this rank's part of the model over a group of ranks (`dhen.ops.split`): of interaction modules
        that say how they are split, and of the head, unless members have one each."""
        for layer in self.layers:
            assert isinstance(layer, DhenLayer)
            layer.split(group)
        if self.members == 1:
            assert isinstance(self.head, nn.Sequential)
            split_in_turn([*self.head, self.logit], group)


def _heads(config: DhenConfig, n_in: int, n_out: int) -> tuple[nn.Module, Linear | MemberLinear]:
    """The MLP above the last layer and its map to the logit, one of both for each member."""
    if config.members == 1:
        return mlp(n_in, config.head, dropout=config.dropout), Linear(n_out, 1)
    heads = member_mlp(config.members, n_in, config.head, dropout=config.dropout)
    return heads, MemberLinear(config.members, n_out, 1)


def dhen_cost(config: DhenConfig, schema: FeatureSchema) -> Costs:
    """The cost of `DhenModel`, an item for each part of each layer."""
    layers = [
        row
        for index, (layer, shape) in enumerate(zip(config.layers, _shapes(config, schema), strict=True))
        for row in within(f"layer{index}", layer_cost(layer, shape))
    ]
    return (*within("features", feature_cost(config, schema)), *layers, *_head_cost(config))


def taped_dhen(config: DhenConfig, schema: FeatureSchema, setting: Setting) -> Iterator[Taped]:
    """Yields `DhenModel` as features, layers and head, each written down when it is asked for."""
    shapes = _shapes(config, schema)
    raw = any(shape.takes_raw(layer) for layer, shape in zip(config.layers, shapes, strict=True))
    yield taped_features(config, schema, setting, raw=raw)
    for index, (layer, shape) in enumerate(zip(config.layers, shapes, strict=True)):
        yield taped_layer(layer, shape, config.dropout, setting)._replace(name=f"layer{index}")
    yield _taped_head(config, setting)


def _taped_head(config: DhenConfig, setting: Setting) -> Taped:
    width, members, p = _head_width(config), config.members, config.dropout
    tape, flops = Tape(*setting), headline_flops(_head_cost(config))
    if members > 1:
        logit = heads_tape(tape, members, width, config.head, p=p, parted=_part(config))
    else:
        *how, last = _head_split(config, setting.ranks)
        hidden = mlp_tape(tape, tape.input(width), width, config.head, dropout=p, how=how)
        logit = linear_tape(tape, hidden, (width, *config.head)[-1], 1, how=last)
    return Taped("head", flops - tape.flops_elsewhere, tape, logit, whole=_whole_head(config, setting.ranks))


def _head_split(config: DhenConfig, ranks: int) -> list[How | None]:
    return how_split([(0, width) for width in (*config.head, 1)], ranks)


def _whole_head(config: DhenConfig, ranks: int) -> tuple[str, ...]:
    """What of the head a rank of so many has whole, and why; the map to the logit alone is no loss."""
    if ranks == 1 or not config.head:
        return ()
    reason = "members have one each" if config.members > 1 else undivided(config.head, ranks)
    return (f"head ({reason})",) if reason else ()


def _head_cost(config: DhenConfig) -> Costs:
    if config.members > 1:
        return heads_cost(config.members, _head_width(config), config.head)
    return mlp_cost("head", _head_width(config), (*config.head, 1))[:-1]


def _shapes(config: DhenConfig, schema: FeatureSchema) -> list[LayerShape]:
    """What reaches each layer."""
    inputs = [num_embeddings(config, schema), *(layer.embeddings for layer in config.layers)]
    return [
        LayerShape(
            embeddings=m,
            dim=config.embedding_dim,
            numeric=len(schema.numeric),
            members=config.members if index >= config.members_from else 1,
            parting=config.members > 1 and index == config.members_from,
        )
        for index, (m, _) in enumerate(pairwise(inputs))
    ]


def _part(config: DhenConfig) -> bool:
    """Whether members part in the layers, not in their heads alone."""
    return config.members_from < len(config.layers)


def _head_width(config: DhenConfig) -> int:
    return config.layers[-1].embeddings * config.embedding_dim
