"""AdvancedDLRM as an interaction module (DHEN paper, section 3.2.1; ours as `dhen.ops.pairwise` states it).

v = MLP([dots(x), flatten(x)]), u = reshape(W_m v), W_m in R^(v x l d).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs
from dhen.ops.pairwise import PairwiseDots, pairwise_cost, pairwise_tape, pairwise_width
from dhen.ops.parts import Tower, Widths
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

    def tower(self, shape: BlockShape) -> Tower:
        """MLP, W_m."""
        width = pairwise_width(shape.embeddings, shape.dim, self.rank)
        return Tower(width, self.mlp, shape.out, shape.dim)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        dots = PairwiseDots(shape.embeddings, self.rank)
        return nn.Sequential(dots, *self.tower(shape).build(dropout=dropout))

    def cost(self, shape: BlockShape) -> Costs:
        """Dots, MLP, W_m."""
        return (*pairwise_cost(shape.embeddings, shape.dim, self.rank), *self.tower(shape).cost())

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Dots, MLP, W_m."""
        dots = pairwise_tape(tape, x, shape.embeddings, shape.dim, self.rank)
        return self.tower(shape).write(tape, dots, dropout=dropout, split=True)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """The MLP's maps and W_m by columns and rows in turn; every rank takes all dot products."""
        Tower.split(module, group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Widths that the ranks do not divide."""
        return self.tower(shape).whole(ranks)
