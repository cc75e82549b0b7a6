"""FINAL's factorized interaction layers (Zhu et al., SIGIR 2023, doi 10.1145/3539618.3591988).

A linear layer with twice the outputs, (a, b) = W x + c, and y = a + a * b: n of them reach interactions of
order 2^n. Over the flattened embeddings; u = reshape(W_m y). Left out: the paper's batch norm, which the DHEN
layer's own norm stands in for, and its second block with a fusion (see `dhen/blocks/two_stream.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import VectorToEmbeddings, Widths
from dhen.tape import Tape


class FactorizedConfig(DropoutBlockConfig):
    """Factorized interaction layers and W_m."""

    kind: Literal["factorized"] = "factorized"
    widths: Widths = Field(default=(64, 64), min_length=1)
    """Widths of the layers; the last is the length of v, which W_m maps to embeddings."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        widths = pairwise((shape.width, *self.widths))
        return nn.Sequential(
            nn.Flatten(),
            *(FactorizedInteraction(a, b, dropout=dropout) for a, b in widths),
            VectorToEmbeddings(self.widths[-1], shape.out, shape.dim),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """A matmul per layer, W_m."""
        layers = [
            row
            for index, (a, b) in enumerate(pairwise((shape.width, *self.widths)))
            for row in (
                linear_cost(f"layer{index}", a, 2 * b),
                elementwise_cost(f"layer{index}.product", b, flops_each=2),
            )
        ]
        return (*layers, linear_cost("w_m", self.widths[-1], shape.out_width))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """A matmul and a product of its halves per layer, W_m."""
        for n_in, width in pairwise((shape.width, *self.widths)):
            factors = linear_tape(tape, x, n_in, 2 * width, p=dropout)
            a, b = tape.unbind(factors, 2)
            product = tape.operation(
                width, [a, b], saves=[factors], view=True, backward_running=tape.held(width)
            )
            x = tape.add(a, product)
            tape.refer(factors)
        return linear_tape(tape, x, self.widths[-1], shape.out_width)


class FactorizedInteraction(nn.Module):
    """(B, n_in) -> (B, width)."""

    def __init__(self, n_in: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.factors = Linear(n_in, 2 * width, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        """a + a * b."""
        a, b = self.factors(x).chunk(2, dim=1)
        return torch.addcmul(a, a, b)
