"""The DHEN layer: Y = Norm(Ensemble_i(Interaction_i(X)) + ShortCut(X)) (paper, equations 1 and 2).

With the norm in front (pre-norm, arXiv 2002.04745), Y = Ensemble_i(Interaction_i(Norm(X))) + ShortCut(X).

Shapes: B examples (of B K rows where there are K members), M embeddings, D their dimension; K numeric inputs in
`raw_BK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from dhen.blocks import BlockConfig, BlockShape
from dhen.config import LayerConfig
from dhen.cost import CostRow, Costs, elementwise_cost, headline_flops, linear_cost, within
from dhen.ensembles.base import EnsembleConfig, EnsembleShape
from dhen.members import MemberAdapter, adapter_cost, adapter_tape, of_members
from dhen.memory.parts import mapping
from dhen.memory.segments import Setting, Taped, Undeclared
from dhen.memory.tape import Tape
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.norm import NormKind, any_norm_tape, build_norm, norm_cost
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
        tape.mark("adapter", mapping(0.0, shape.embeddings, shape.dim, shape.embeddings))
        x = inputs = adapter_tape(tape, x, shape.members, shape.embeddings, shape.dim)
    if shape.takes_raw(config):
        raw = tape.scratch(shape.numeric) if shape.members > 1 else tape.beside(shape.numeric)
        tape.mark("mlp", mapping(linear_cost("", shape.numeric, shape.dim).flops, 1, shape.numeric, 1))
        embedded = linear_tape(tape, raw, shape.numeric, shape.dim, x_needs_gradient=False)
        tape.mark("concat", mapping(0.0, shape.embeddings + 1, shape.dim, shape.embeddings + 1))
        inputs = tape.concat([x, embedded])
    block_shape, norm_first = shape.block(config), config.norm_placement == "pre"
    if norm_first:
        inputs = write_norm(tape, inputs, config.norm, block_shape.embeddings, shape.dim)
    outputs = [write_block(tape, inputs, block, block_shape, dropout=dropout) for block in config.modules]
    y = write_ensemble(tape, outputs, inputs, config.ensemble, shape.ensemble(config))
    if config.shortcut:
        y = _write_shortcut(tape, x, y, config, shape)
    if not norm_first:
        y = write_norm(tape, y, config.norm, config.embeddings, shape.dim)
    for _ in range(len(config.modules) - 1 + config.shortcut):  # gradients of what several read are added up
        tape.mark("gradient sum", mapping(0.0, block_shape.embeddings, shape.dim, block_shape.embeddings))
    tape.refer(x, inputs)
    return y


def write_block(tape: Tape, x: int, block: BlockConfig, shape: BlockShape, *, dropout: float) -> int:
    """Writes an interaction module of a model with this dropout down, as a part; the tensor u_BLD."""
    tape.mark(f"block {block.kind}", mapping(block.work(shape), shape.embeddings, shape.dim, shape.out))
    return block.write(tape, x, shape, dropout=block.dropout_in(dropout))


def write_ensemble(
    tape: Tape, outputs: Sequence[int], x: int, ensemble: EnsembleConfig, shape: EnsembleShape
) -> int:
    """Writes an ensemble down, as a part; the joined tensor."""
    flops = headline_flops(ensemble.cost(shape))
    sizes = mapping(
        flops, shape.modules * shape.out, shape.dim, ensemble.embeddings(shape.modules, shape.out)
    )
    tape.mark(f"ensemble {ensemble.kind}", sizes)
    return ensemble.write(tape, outputs, x, shape)


def write_norm(tape: Tape, x: int, norm: NormKind, embeddings: int, dim: int) -> int:
    """Writes a norm of so many embeddings down, as a part."""
    if norm != "none":
        tape.mark(f"norm {norm}", mapping(0.0, embeddings, dim, embeddings))
    return any_norm_tape(tape, x, norm, embeddings, dim)


def _write_shortcut(tape: Tape, x: int, y: int, config: LayerConfig, shape: LayerShape) -> int:
    m, dim, out = shape.embeddings, shape.dim, config.embeddings
    if m != out:
        tape.mark("block linear", mapping(projection_cost("", m, out, dim).flops, m, dim, out))
        x = projection_tape(tape, x, m, out, dim)
    tape.mark("sum", mapping(0.0, out, dim, out))
    return tape.add(y, x)
