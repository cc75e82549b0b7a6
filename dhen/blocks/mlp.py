"""A plain MLP over the flattened embeddings: u = reshape(W_m MLP(flatten(x))).

Not one of the DHEN paper's five; the deep tower of Wide & Deep (arXiv 1606.07792) and DCN-V2.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs
from dhen.memory.tape import Tape
from dhen.ops.parts import (
    VectorToEmbeddings,
    Widths,
    mlp,
    mlp_cost,
    mlp_tape,
    vector_to_embeddings_cost,
    vector_to_embeddings_tape,
)


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
        v = mlp_tape(tape, x, shape.embeddings * shape.dim, self.mlp, dropout=dropout)
        return vector_to_embeddings_tape(tape, v, self.mlp[-1], shape.out, shape.dim)
