"""DHEN as a whole: features -> layers -> logit (paper, section 3, figures 1 and 2).

Shapes: B examples, M embeddings, D their dimension, V = M D numbers of all embeddings; K numeric inputs in
`raw_BK`, else K members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch
from dhen.blocks import BlockConfig, BlockShape
from dhen.config import DhenConfig, LayerConfig
from dhen.cost import CostRow, Costs, elementwise_cost, headline_flops, linear_cost, within
from dhen.ensembles.ensembles import EnsembleShape
from dhen.inputs.features import FeatureProcessing, feature_cost, taped_features
from dhen.inputs.lift import num_embeddings
from dhen.members import (
    MemberAdapter,
    MemberLinear,
    adapter_cost,
    adapter_tape,
    by_member,
    heads_cost,
    heads_tape,
    mean_logit_of_members,
    member_mlp,
    of_members,
)
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.norm import any_norm_tape, build_norm, norm_cost
from dhen.ops.parts import (
    EmbeddingProjection,
    mlp,
    mlp_cost,
    projection_cost,
    projection_tape,
    split_in_turn,
    tower_tape,
    undivided,
)
from dhen.ops.split import RankGroup
from dhen.schema import FeatureSchema
from dhen.tape import FP32_BYTES, Tape, TapedSegment, TapeSetting, UntapedSegment, row_bytes

# The DHEN layer: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)) (paper, equations 1 and 2).
#
# With the norm in front (pre-norm, arXiv 2002.04745), Y = Ensemble_i(Interaction_i(Norm(X))) + ShortCut(X).


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Where a layer stands: what reaches it."""

    embeddings: int
    """M, embeddings in."""
    dim: int
    """D, length of each."""
    numeric: int
    """K, raw numeric inputs of the log."""
    members: int = 1
    """That share the layer (`dhen.members`)."""
    parting: bool = False
    """Whether what reaches it is still shared by all members."""

    @property
    def rows(self) -> int:
        """Of the batch dimension, an example, of what reaches it."""
        return 1 if self.parting else self.members

    def takes_raw(self, config: LayerConfig) -> bool:
        """Whether the modules see the raw numeric inputs (there must be some)."""
        return config.raw_numeric and self.numeric > 0

    def block(self, config: LayerConfig) -> BlockShape:
        """The shape at which the layer's interaction modules stand."""
        embeddings = self.embeddings + self.takes_raw(config)
        return BlockShape(embeddings=embeddings, dim=self.dim, out=config.out_embeddings)

    def ensemble(self, config: LayerConfig) -> EnsembleShape:
        """The shape at which the layer's ensemble stands."""
        block = self.block(config)
        return EnsembleShape(
            modules=len(config.modules), out=block.out, embeddings=block.embeddings, dim=block.dim
        )


class DhenLayer(nn.Module):
    """x_BMD -> y_BM'D, M' = `config.embeddings`; with members y has a row for each member of an example."""

    def __init__(self, config: LayerConfig, shape: LayerShape, *, dropout: float) -> None:
        super().__init__()
        block_shape = shape.block(config)
        self.modules_config = config.modules
        self.adapter: MemberAdapter | None = None
        if shape.members > 1:
            self.adapter = MemberAdapter(shape.members, shape.embeddings, shape.dim, parting=shape.parting)
        self.raw_numeric = Linear(shape.numeric, shape.dim) if shape.takes_raw(config) else None
        self.blocks = nn.ModuleList(
            block.build(block_shape, dropout=block.dropout_in(dropout)) for block in config.modules
        )
        self.ensemble = config.ensemble.build(shape.ensemble(config))
        self.shortcut: nn.Module | None = None
        if config.shortcut:
            same = config.embeddings == shape.embeddings
            self.shortcut = (
                nn.Identity() if same else EmbeddingProjection(shape.embeddings, config.embeddings)
            )
        self.norm, self.norm_first = build_norm(config.norm, shape.dim), config.norm_placement == "pre"

    def forward(self, x_BMD: Tensor, raw_BK: Tensor) -> Tensor:
        """The shortcut sees X alone; the modules see X, with the raw numeric inputs if asked for."""
        if self.adapter is not None:
            x_BMD = self.adapter(x_BMD)
        inputs = x_BMD
        if self.raw_numeric is not None:
            if self.adapter is not None:  # for each member
                raw_BK = raw_BK.repeat_interleave(len(self.adapter.scale), dim=0)
            inputs = torch.cat((x_BMD, self.raw_numeric(raw_BK).unsqueeze(1)), dim=1)
        if self.norm_first:
            inputs = self.norm(inputs)
        y = self.ensemble([block(inputs) for block in self.blocks], inputs)
        if self.shortcut is not None:
            y = y + self.shortcut(x_BMD)
        return y if self.norm_first else self.norm(y)  # type: ignore[no-any-return]

    def split(self, group: RankGroup) -> None:
        """Leaves this rank's parts of the interaction modules that are split; the rest stays whole."""
        for config, block in zip(self.modules_config, self.blocks, strict=True):
            config.split(block, group)


def layer_cost(config: LayerConfig, shape: LayerShape) -> Costs:
    """The cost of `DhenLayer`, a part for each module."""
    block_shape = shape.block(config)
    values = config.embeddings * shape.dim
    rows: list[CostRow] = []
    if shape.takes_raw(config):
        rows.append(linear_cost("raw_numeric", shape.numeric, shape.dim))
    for index, block in enumerate(config.modules):
        rows += within(f"{block.kind}{index}", block.cost(block_shape))
    rows += within("ensemble", config.ensemble.cost(shape.ensemble(config)))
    if config.shortcut:
        if config.embeddings != shape.embeddings:
            rows.append(projection_cost("shortcut", shape.embeddings, config.embeddings, shape.dim))
        rows.append(elementwise_cost("shortcut.sum", values))
    normed = block_shape.embeddings if config.norm_placement == "pre" else config.embeddings
    rows += norm_cost(config.norm, normed, shape.dim)
    if shape.members == 1:
        return tuple(rows)
    adapter = adapter_cost(shape.members, shape.embeddings, shape.dim)
    return (adapter, *of_members(shape.members, tuple(rows), shared=True))


@lru_cache(maxsize=4096)
def taped_layer(config: LayerConfig, shape: LayerShape, dropout: float, setting: TapeSetting) -> TapedSegment:
    """`DhenLayer` from x_BMD (and raw_BK, which somebody else counts) to y_BM'D."""
    flops, tape = headline_flops(layer_cost(config, shape)), Tape(*setting)
    try:
        output = _write_layer(tape, config, shape, dropout)
    except NotImplementedError:
        kinds = {block.kind for block in config.modules if type(block).write is BlockConfig.write}
        undeclared = UntapedSegment(
            build=partial(DhenLayer, config, shape, dropout=dropout),
            inputs=((shape.embeddings, shape.dim), (shape.numeric,)),
            kinds=tuple(sorted(kinds)),
            rows=shape.rows,
        )
        of_all = tuple(
            f"{kind} (it declares no memory, so it is priced as if whole)" for kind in sorted(kinds)
        )
        return TapedSegment("layer", flops, None, 0, undeclared, whole=of_all if setting.ranks > 1 else ())
    whole: tuple[str, ...] = ()
    if setting.ranks > 1:
        reasons = [(block.kind, block.whole(shape.block(config), setting.ranks)) for block in config.modules]
        whole = tuple(f"{kind} ({reason})" for kind, reason in reasons if reason is not None)
    return TapedSegment("layer", flops - tape.flops_elsewhere, tape, output, whole=whole)


def _write_layer(tape: Tape, config: LayerConfig, shape: LayerShape, dropout: float) -> int:
    tape.rows = shape.rows
    x = inputs = tape.input(shape.embeddings * shape.dim)
    if shape.members > 1:
        x = inputs = adapter_tape(tape, x, shape.members, shape.embeddings, shape.dim)
    if shape.takes_raw(config):
        raw = tape.scratch(shape.numeric) if shape.members > 1 else tape.beside(shape.numeric)
        embedded = linear_tape(tape, raw, shape.numeric, shape.dim, x_needs_gradient=False)
        inputs = tape.concat([x, embedded])
    block_shape, norm_first = shape.block(config), config.norm_placement == "pre"
    if norm_first:
        inputs = any_norm_tape(tape, inputs, config.norm, block_shape.embeddings, shape.dim)
    outputs = [
        block.write(tape, inputs, block_shape, dropout=block.dropout_in(dropout)) for block in config.modules
    ]
    y = config.ensemble.write(tape, outputs, inputs, shape.ensemble(config))
    if config.shortcut:
        m, out = shape.embeddings, config.embeddings
        passed = x if m == out else projection_tape(tape, x, m, out, shape.dim)
        y = tape.add(y, passed)
    if not norm_first:
        y = any_norm_tape(tape, y, config.norm, config.embeddings, shape.dim)
    tape.refer(x, inputs)
    return y


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
        last, p = (width, *config.head)[-1], config.dropout
        self.head: nn.Module
        self.logit: Linear | MemberLinear
        if self.members == 1:
            self.head, self.logit = mlp(width, config.head, dropout=p), Linear(last, 1)
        else:  # one of both for each member
            self.head = member_mlp(self.members, width, config.head, dropout=p)
            self.logit = MemberLinear(self.members, last, 1)
        self.row_bytes = row_bytes(taped_dhen(config, schema, TapeSetting(FP32_BYTES, "cpu")))
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
        return logit_BK if self.training else mean_logit_of_members(logit_BK)

    def split(self, group: RankGroup) -> None:
        """Leaves this rank's part of the model over a group of ranks (`dhen.ops.split`): of interaction modules
        that say how they are split, and of the head, unless members have one each."""
        for layer in self.layers:
            assert isinstance(layer, DhenLayer)
            layer.split(group)
        if self.members == 1:
            assert isinstance(self.head, nn.Sequential)
            split_in_turn([*self.head, self.logit], group)


def dhen_cost(config: DhenConfig, schema: FeatureSchema) -> Costs:
    """The cost of `DhenModel`, an item for each part of each layer."""
    layers = [
        row
        for index, (layer, shape) in enumerate(zip(config.layers, _shapes(config, schema), strict=True))
        for row in within(f"layer{index}", layer_cost(layer, shape))
    ]
    return (*within("features", feature_cost(config, schema)), *layers, *_head_cost(config))


def taped_dhen(config: DhenConfig, schema: FeatureSchema, setting: TapeSetting) -> Iterator[TapedSegment]:
    """Yields `DhenModel` as features, layers and head, each written down when it is asked for."""
    shapes = _shapes(config, schema)
    raw = any(shape.takes_raw(layer) for layer, shape in zip(config.layers, shapes, strict=True))
    yield taped_features(config, schema, setting, raw=raw)
    for index, (layer, shape) in enumerate(zip(config.layers, shapes, strict=True)):
        yield taped_layer(layer, shape, config.dropout, setting)._replace(name=f"layer{index}")
    width, p = _head_width(config), config.dropout
    tape, flops = Tape(*setting), headline_flops(_head_cost(config))
    if config.members > 1:
        why_whole: str | None = "members have one each"
        logit = heads_tape(tape, config.members, width, config.head, p=p, parted=_part(config))
    else:
        why_whole = undivided(config.head, setting.ranks)
        logit = tower_tape(tape, tape.input(width), width, config.head, 1, dropout=p)
    # the map to the logit alone is no loss
    whole = (f"head ({why_whole})",) if setting.ranks > 1 and config.head and why_whole else ()
    yield TapedSegment("head", flops - tape.flops_elsewhere, tape, logit, whole=whole)


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
