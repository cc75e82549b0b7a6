"""Wukong's factorization machine block (arXiv 2403.02545, section 3.4): u = W_m MLP(LN(flatten(X X^T Y))).

X X^T has the dot products of all pairs of embeddings; Y in R^(m x k) mixes them down to k for each embedding,
and X (X^T Y) costs m d k where X X^T costs m^2 d. Wukong's other half, the linear compression block W X, is
`dhen/blocks/linear.py`: a Wukong layer is both of them under `concat`. Left out: Y from an MLP of X
("attentive"); it is learned here.

Shapes: B examples, M embeddings, D their dimension, K mixes of embeddings.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs, product_cost
from dhen.ops.norm import LayerNorm, norm_cost, norm_tape
from dhen.ops.parts import EmbeddingProjection, Tower, Widths, projection_cost, projection_tape
from dhen.tape import Tape


class LowRankFmConfig(DropoutBlockConfig):
    """Dot products with k mixes of the embeddings, their norm, an MLP, and W_m."""

    kind: Literal["low_rank_fm"] = "low_rank_fm"
    rank: int = Field(default=8, gt=0, le=4096)
    """k, the number of learned mixes of the embeddings that each embedding is multiplied with."""
    mlp: Widths = Field(default=(128, 64), min_length=1)
    """Widths of the MLP; the last is the length of v, which W_m maps to embeddings."""

    def tower(self, shape: BlockShape) -> Tower:
        """The MLP, W_m."""
        return Tower(shape.embeddings * self.rank, self.mlp, shape.out, shape.dim)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        dots = LowRankDots(shape.embeddings, self.rank)
        return nn.Sequential(dots, *self.tower(shape).build(dropout=dropout))

    def cost(self, shape: BlockShape) -> Costs:
        """X^T Y, its product with X, the norm, the MLP, W_m."""
        m, d = shape.embeddings, shape.dim
        return (
            projection_cost("mix", m, self.rank, d),
            product_cost("dots", m, d, self.rank),
            *norm_cost("layer", 1, m * self.rank),
            *self.tower(shape).cost(),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """X^T Y, its product with X, the norm, the MLP, W_m."""
        m, d = shape.embeddings, shape.dim
        width = m * self.rank
        mixes = projection_tape(tape, x, m, self.rank, d)
        dots = tape.operation(width, [x, mixes], saves=[x, mixes])
        tape.refer(mixes)
        return self.tower(shape).write(tape, norm_tape(tape, dots, 1, width), dropout=dropout)


class LowRankDots(nn.Module):
    """x_BMD -> (B, M k)."""

    def __init__(self, embeddings: int, rank: int) -> None:
        super().__init__()
        self.mix = EmbeddingProjection(embeddings, rank)
        self.norm = LayerNorm(embeddings * rank)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """LN(flatten(X (X^T Y)))."""
        mixes_BKD = self.mix(x_BMD)
        dots: Tensor = self.norm(torch.bmm(x_BMD, mixes_BKD.mT).flatten(1))
        return dots
