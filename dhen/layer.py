"""The DHEN layer: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)) (paper, equations 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from dhen.blocks import BlockConfig, BlockShape
from dhen.config import LayerConfig
from dhen.cost import NORM_FLOPS, CostRow, Costs, elementwise_cost, headline_flops, linear_cost, within
from dhen.linear import Linear, linear_tape
from dhen.norm import LayerNorm, norm_tape
from dhen.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.segment import Setting, Taped, Undeclared
from dhen.tape import Tape


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Where a layer stands: what reaches it."""

    embeddings: int
    """M, embeddings in."""
    dim: int
    """D, length of each."""
    numeric: int
    """K, raw numeric inputs of the log."""

    def takes_raw(self, config: LayerConfig) -> bool:
        """Whether the modules see the raw numeric inputs (there must be some)."""
        return config.raw_numeric and self.numeric > 0

    def block(self, config: LayerConfig) -> BlockShape:
        """The shape at which the layer's interaction modules stand."""
        embeddings = self.embeddings + self.takes_raw(config)
        return BlockShape(embeddings=embeddings, dim=self.dim, out=config.out_embeddings)


class DhenLayer(nn.Module):
    """x_BMD -> y_BM'D, M' = `config.embeddings`."""

    def __init__(self, config: LayerConfig, shape: LayerShape, *, dropout: float) -> None:
        super().__init__()
        block_shape = shape.block(config)
        self.raw_numeric = Linear(shape.numeric, shape.dim) if shape.takes_raw(config) else None
        self.blocks = nn.ModuleList(block.build(block_shape, dropout=dropout) for block in config.modules)
        self.ensemble = config.ensemble.build(len(config.modules))
        self.shortcut: nn.Module | None = None
        if config.shortcut:
            same = config.embeddings == shape.embeddings
            self.shortcut = (
                nn.Identity() if same else EmbeddingProjection(shape.embeddings, config.embeddings)
            )
        self.norm = LayerNorm(shape.dim) if config.norm == "layer" else nn.Identity()

    def forward(self, x_BMD: Tensor, raw_BK: Tensor) -> Tensor:
        """The shortcut sees X alone; the modules see X, with the raw numeric inputs where asked for."""
        inputs = x_BMD
        if self.raw_numeric is not None:
            inputs = torch.cat((x_BMD, self.raw_numeric(raw_BK).unsqueeze(1)), dim=1)
        y = self.ensemble([block(inputs) for block in self.blocks])
        if self.shortcut is not None:
            y = y + self.shortcut(x_BMD)
        return self.norm(y)  # type: ignore[no-any-return]


def layer_cost(config: LayerConfig, shape: LayerShape) -> Costs:
    """The cost of `DhenLayer`, a part for each module."""
    block_shape = shape.block(config)
    values = config.embeddings * shape.dim
    rows: list[CostRow] = []
    if shape.takes_raw(config):
        rows.append(linear_cost("raw_numeric", shape.numeric, shape.dim))
    for index, block in enumerate(config.modules):
        rows += within(f"{block.kind}{index}", block.cost(block_shape))
    rows += within("ensemble", config.ensemble.cost(len(config.modules), config.out_embeddings, shape.dim))
    if config.shortcut:
        if config.embeddings != shape.embeddings:
            rows.append(projection_cost("shortcut", shape.embeddings, config.embeddings, shape.dim))
        rows.append(elementwise_cost("shortcut.sum", values))
    if config.norm == "layer":
        rows.append(elementwise_cost("norm", values, flops_each=NORM_FLOPS, parameters=2 * shape.dim))
    return tuple(rows)


@lru_cache(maxsize=4096)
def taped_layer(config: LayerConfig, shape: LayerShape, dropout: float, setting: Setting) -> Taped:
    """`DhenLayer` from x_BMD (and raw_BK, which somebody else counts) to y_BM'D."""
    flops, tape = headline_flops(layer_cost(config, shape)), Tape(*setting)
    try:
        return Taped("layer", flops, tape, _write_layer(tape, config, shape, dropout))
    except NotImplementedError:
        kinds = {block.kind for block in config.modules if type(block).write is BlockConfig.write}
        undeclared = Undeclared(
            build=partial(DhenLayer, config, shape, dropout=dropout),
            inputs=((shape.embeddings, shape.dim), (shape.numeric,)),
            kinds=tuple(sorted(kinds)),
        )
        return Taped("layer", flops, None, 0, undeclared)


def _write_layer(tape: Tape, config: LayerConfig, shape: LayerShape, dropout: float) -> int:
    x = inputs = tape.input(shape.embeddings * shape.dim)
    if shape.takes_raw(config):
        raw = tape.beside(shape.numeric)
        embedded = linear_tape(tape, raw, shape.numeric, shape.dim, x_needs_gradient=False)
        inputs = tape.concat([x, embedded])
    block_shape = shape.block(config)
    outputs = [block.write(tape, inputs, block_shape, dropout=dropout) for block in config.modules]
    y = config.ensemble.write(tape, outputs)
    if config.shortcut:
        same = config.embeddings == shape.embeddings
        y = tape.add(
            y, x if same else projection_tape(tape, x, shape.embeddings, config.embeddings, shape.dim)
        )
    if config.norm == "layer":
        y = norm_tape(tape, y, config.embeddings, shape.dim)
    tape.refer(inputs)
    return y
