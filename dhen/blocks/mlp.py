"""A plain MLP over the flattened embeddings: u = reshape(W_m MLP(flatten(x))).

Not one of the DHEN paper's five; the deep tower of Wide & Deep (arXiv 1606.07792) and DCN-V2.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs
from dhen.ops.parts import Tower, Widths
from dhen.ops.split import RankGroup
from dhen.tape import Tape


class MlpConfig(DropoutBlockConfig):
    """An MLP and W_m."""

    kind: Literal["mlp"] = "mlp"
    mlp: Widths = Field(default=(128, 64), min_length=1)
    """Widths of the MLP; the last is the length of v, which W_m maps to embeddings."""

    def tower(self, shape: BlockShape) -> Tower:
        """MLP, W_m."""
        return Tower(shape.width, self.mlp, shape.out, shape.dim)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(nn.Flatten(), *self.tower(shape).build(dropout=dropout))

    def cost(self, shape: BlockShape) -> Costs:
        """MLP, W_m."""
        return self.tower(shape).cost()

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """MLP, W_m."""
        return self.tower(shape).write(tape, x, dropout=dropout, split=True)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """The MLP's maps and W_m by columns and rows in turn."""
        Tower.split(module, group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Widths that the ranks do not divide."""
        return self.tower(shape).whole(ranks)
