"""The DHEN layer: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)) (paper, equations 1 and 2).

With the norm in front (pre-norm, arXiv 2002.04745), Y = Ensemble_i(Interaction_i(Norm(X))) + ShortCut(X).

Shapes: B examples (of B K rows where there are K members), M embeddings, D their dimension; K numeric inputs in
`raw_BK`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from dhen.blocks import BlockConfig, BlockShape
from dhen.config import LayerConfig
from dhen.cost import CostRow, Costs, elementwise_cost, headline_flops, linear_cost, within
from dhen.ensembles.base import EnsembleShape
from dhen.members import MemberAdapter, adapter_cost, adapter_tape, of_members
from dhen.memory.segments import Setting, Taped, Undeclared
from dhen.memory.tape import Tape
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.norm import any_norm_tape, build_norm, norm_cost
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.ops.split import RankGroup


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
        self.adapter = _adapter(shape)
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
        """The shortcut sees X alone; the modules see X, with the raw numeric inputs where asked for."""
        if self.adapter is not None:
            x_BMD = self.adapter(x_BMD)
        inputs = x_BMD
        if self.raw_numeric is not None:
            raw = self._repeated(raw_BK)
            inputs = torch.cat((x_BMD, self.raw_numeric(raw).unsqueeze(1)), dim=1)
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

    def _repeated(self, raw_BK: Tensor) -> Tensor:
        """For each member."""
        return raw_BK if self.adapter is None else raw_BK.repeat_interleave(len(self.adapter.scale), dim=0)


def _adapter(shape: LayerShape) -> MemberAdapter | None:
    if shape.members == 1:
        return None
    return MemberAdapter(shape.members, shape.embeddings, shape.dim, parting=shape.parting)


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
def taped_layer(config: LayerConfig, shape: LayerShape, dropout: float, setting: Setting) -> Taped:
    """`DhenLayer` from x_BMD (and raw_BK, which somebody else counts) to y_BM'D."""
    flops, tape = headline_flops(layer_cost(config, shape)), Tape(*setting)
    try:
        output = _write_layer(tape, config, shape, dropout)
        whole = _whole(config, shape, setting.ranks)
        return Taped("layer", flops - tape.flops_elsewhere, tape, output, whole=whole)
    except NotImplementedError:
        kinds = {block.kind for block in config.modules if type(block).write is BlockConfig.write}
        undeclared = Undeclared(
            build=partial(DhenLayer, config, shape, dropout=dropout),
            inputs=((shape.embeddings, shape.dim), (shape.numeric,)),
            kinds=tuple(sorted(kinds)),
            rows=shape.rows,
        )
        of_all = tuple(
            f"{kind} (it declares no memory, so it is priced as if whole)" for kind in sorted(kinds)
        )
        return Taped("layer", flops, None, 0, undeclared, whole=of_all if setting.ranks > 1 else ())


def _whole(config: LayerConfig, shape: LayerShape, ranks: int) -> tuple[str, ...]:
    """Which interaction modules a rank of so many has whole, or a map of them, and why."""
    if ranks == 1:
        return ()
    reasons = [(block.kind, block.whole(shape.block(config), ranks)) for block in config.modules]
    return tuple(f"{kind} ({reason})" for kind, reason in reasons if reason is not None)


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
        y = _write_shortcut(tape, x, y, config, shape)
    if not norm_first:
        y = any_norm_tape(tape, y, config.norm, config.embeddings, shape.dim)
    tape.refer(x, inputs)
    return y


def _write_shortcut(tape: Tape, x: int, y: int, config: LayerConfig, shape: LayerShape) -> int:
    m, dim, out = shape.embeddings, shape.dim, config.embeddings
    if m != out:
        x = projection_tape(tape, x, m, out, dim)
    return tape.add(y, x)
