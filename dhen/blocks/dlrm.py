"""AdvancedDLRM as an interaction module (DHEN paper, section 3.2.1; ours as `dhen.ops.pairwise` states it).

v = MLP([dots(x), flatten(x)]), u = reshape(W_m v), W_m in R^(v x l d).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.blocks.mlp import split_tower, tower_split
from dhen.cost import Costs
from dhen.ops.pairwise import PairwiseDots, pairwise_cost, pairwise_tape, pairwise_width
from dhen.ops.parts import (
    VectorToEmbeddings,
    Widths,
    mlp,
    mlp_cost,
    mlp_tape,
    undivided,
    vector_to_embeddings_cost,
    vector_to_embeddings_tape,
)
from dhen.ops.split import RankGroup
from dhen.tape import Tape


class DlrmConfig(DropoutBlockConfig):
    """Pairwise dot products, an MLP, and W_m."""

    kind: Literal["dlrm"] = "dlrm"
    rank: int = Field(default=0, ge=0, le=65_536)
    """Number of learned mixes of the embeddings among which dot products are taken; 0: among the
    embeddings."""
    mlp: Widths = Field(default=(128, 64), min_length=1)
    """Widths of the MLP; the last is the length of v, which W_m maps to embeddings."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        width = pairwise_width(shape.embeddings, shape.dim, self.rank)
        return nn.Sequential(
            PairwiseDots(shape.embeddings, self.rank),
            mlp(width, self.mlp, dropout=dropout),
            VectorToEmbeddings(self.mlp[-1], shape.out, shape.dim),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Dots, MLP, W_m."""
        width = pairwise_width(shape.embeddings, shape.dim, self.rank)
        return (
            *pairwise_cost(shape.embeddings, shape.dim, self.rank),
            *mlp_cost("mlp", width, self.mlp),
            vector_to_embeddings_cost("w_m", self.mlp[-1], shape.out, shape.dim),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Dots, MLP, W_m."""
        width = pairwise_width(shape.embeddings, shape.dim, self.rank)
        dots = pairwise_tape(tape, x, shape.embeddings, shape.dim, self.rank)
        *how, last = tower_split(self.mlp, shape, tape.ranks)
        v = mlp_tape(tape, dots, width, self.mlp, dropout=dropout, how=how)
        return vector_to_embeddings_tape(tape, v, self.mlp[-1], shape.out, shape.dim, how=last)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """The MLP's maps and W_m by columns and rows in turn; every rank takes all dot products."""
        split_tower(module, group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Widths that the ranks do not divide."""
        return undivided((*self.mlp, shape.out * shape.dim), ranks)
