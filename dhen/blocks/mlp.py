"""A plain MLP over the flattened embeddings: u = reshape(W_m MLP(flatten(x))).

Not one of the DHEN paper's five; the deep tower of Wide & Deep (arXiv 1606.07792) and DCN-V2.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs
from dhen.ops.parts import (
    VectorToEmbeddings,
    Widths,
    mlp,
    mlp_cost,
    mlp_tape,
    split_in_turn,
    undivided,
    vector_to_embeddings_cost,
    vector_to_embeddings_tape,
)
from dhen.ops.split import How, RankGroup, how_split
from dhen.tape import Tape


class MlpConfig(DropoutBlockConfig):
    """An MLP and W_m."""

    kind: Literal["mlp"] = "mlp"
    mlp: Widths = Field(default=(128, 64), min_length=1)
    """Widths of the MLP; the last is the length of v, which W_m maps to embeddings."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            nn.Flatten(),
            mlp(shape.embeddings * shape.dim, self.mlp, dropout=dropout),
            VectorToEmbeddings(self.mlp[-1], shape.out, shape.dim),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """MLP, W_m."""
        return (
            *mlp_cost("mlp", shape.embeddings * shape.dim, self.mlp),
            vector_to_embeddings_cost("w_m", self.mlp[-1], shape.out, shape.dim),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """MLP, W_m."""
        width, (*how, last) = shape.embeddings * shape.dim, tower_split(self.mlp, shape, tape.ranks)
        v = mlp_tape(tape, x, width, self.mlp, dropout=dropout, how=how)
        return vector_to_embeddings_tape(tape, v, self.mlp[-1], shape.out, shape.dim, how=last)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """The MLP's maps and W_m by columns and rows in turn."""
        split_tower(module, group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Widths that the ranks do not divide."""
        return undivided((*self.mlp, shape.out * shape.dim), ranks)


def split_tower(module: nn.Module, group: RankGroup) -> None:
    """Splits the MLP and W_m that a module ends with."""
    assert isinstance(module, nn.Sequential)
    tower, to_embeddings = module[-2], module[-1]
    assert isinstance(tower, nn.Sequential)
    assert isinstance(to_embeddings, VectorToEmbeddings)
    split_in_turn([*tower, to_embeddings.linear], group)


def tower_split(widths: Widths, shape: BlockShape, ranks: int) -> list[How | None]:
    """Returns how an MLP's maps and W_m are split."""
    return how_split([(0, width) for width in (*widths, shape.out * shape.dim)], ranks)
