"""Factorization machines with embeddings out: u_l = sum_(i<j) (w_li x_i) * (w_lj x_j), products by element.

Rendle, "Factorization Machines" (ICDM 2010), equation 1, pooled as in NFM (arXiv 1708.05027, equation 4): the
sum over pairs is half of (sum_i w_li x_i)^2 - sum_i (w_li x_i)^2. The values w_li of the features, data in
Rendle's equation, are learned here, a set for each embedding out. Left out: the linear term, which the
layer's shortcut or `dhen/blocks/linear.py` is.

Shapes: B examples, M embeddings, D their dimension, L embeddings out.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, product_cost
from dhen.ops.parts import EmbeddingProjection, mix_embeddings, projection_cost, projection_tape
from dhen.tape import Tape


class FmConfig(BlockConfig):
    """A factorization machine for each embedding out; nothing to set."""

    kind: Literal["fm"] = "fm"

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return FactorizationMachines(shape.embeddings, shape.out)

    def cost(self, shape: BlockShape) -> Costs:
        """The sums, the sums of squares, squares of weights (at any batch, not counted) and of values."""
        m, d, out = shape.embeddings, shape.dim, shape.out
        return (
            projection_cost("sums", m, out, d),
            elementwise_cost("squares", m * d),
            product_cost("sums_of_squares", out, m, d),
            elementwise_cost("difference", out * d, flops_each=3),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Two projections, one of squares by squares, and their difference."""
        m, d, out = shape.embeddings, shape.dim, shape.out
        sums = projection_tape(tape, x, m, out, d)
        weights = tape.operation(0, [], fixed=out * m)
        scaled = tape.operation(0, [weights], fixed=out * m)
        squares = tape.operation(m * d, [x], saves=[x], backward_running=tape.held(2 * m * d))
        each = tape.operation(out * m, [scaled], view=True)
        sums_of_squares = tape.operation(out * d, [each, squares], saves=[scaled, squares])
        product = tape.operation(
            out * d, [sums, sums], saves=[sums], view=True, backward_running=tape.held(out * d)
        )
        return tape.add(sums_of_squares, product)


class FactorizationMachines(nn.Module):
    """x_BMD -> u_BLD."""

    def __init__(self, embeddings: int, out: int) -> None:
        super().__init__()
        self.values = EmbeddingProjection(embeddings, out)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """((W x)^2 - W^2 x^2) / 2, squares by element."""
        weight_LM = self.values.linear.weight
        sums_BLD = self.values(x_BMD)
        squares_BLD = mix_embeddings(weight_LM.square() * -0.5, x_BMD.square())
        return torch.addcmul(squares_BLD, sums_BLD, sums_BLD, value=0.5)
