"""The outer product of the embeddings with themselves: u = W (x x^T) + b, second order in one layer.

Our first reading of the deep cross network of the DHEN paper (section 3.2.5; docs/decisions), kept as a module
of its own; the paper's form is `dhen/blocks/dcn.py`. With x in R^(d x m), x x^T is d x d: the products of all
pairs of embedding components, summed over embeddings, and W in R^(l x d), b in R^(l x d) make it l embeddings.
It has no residual: the layer's shortcut takes its place.

Shapes: B examples, M embeddings, D their dimension, L embeddings out.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost, product_cost
from dhen.ops.parts import mix_embeddings, projection_tape
from dhen.tape import Tape


class CrossConfig(BlockConfig):
    """The outer product of the embeddings with themselves, projected; nothing to set."""

    kind: Literal["cross"] = "cross"

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return Cross(shape)

    def cost(self, shape: BlockShape) -> Costs:
        """The product, the projection, the bias."""
        d, out = shape.dim, shape.out
        return (
            product_cost("outer", d, shape.embeddings, d),
            linear_cost("projection", d, out, positions=d, bias=False),
            elementwise_cost("bias", out * d, parameters=out * d),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The product, of which both factors are x, the projection, the bias."""
        d, out = shape.dim, shape.out
        outer = tape.operation(d * d, [x, x], saves=[x])
        projected = projection_tape(tape, outer, d, out, d)
        return tape.operation(out * d, [projected], parameters=[(out, d)], passes=True)


class Cross(nn.Module):
    """x_BMD -> u_BLD = W_LD (x^T x)_BDD + b_LD."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.weight = nn.Linear(shape.dim, shape.out, bias=False)
        self.bias_LD = nn.Parameter(torch.zeros(shape.out, shape.dim))
        # The outer product sums M terms: scaled at the start so that u begins at the size of x.
        with torch.no_grad():
            self.weight.weight.mul_(shape.embeddings**-0.5)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """x^T x is symmetric, so applying W to its rows or to its columns is the same."""
        outer_BDD = torch.bmm(x_BMD.mT, x_BMD)
        return mix_embeddings(self.weight.weight, outer_BDD) + self.bias_LD
