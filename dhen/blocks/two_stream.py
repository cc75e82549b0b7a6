"""FinalMLP's two streams and their bilinear fusion (arXiv 2304.00902, sections 3.2 and 3.3).

Two MLPs over the flattened embeddings, each behind a gate of its own, 2 sigmoid(G_s x) on every embedding
(feature selection; 1 at the start); their outputs o_1, o_2 are cut into heads and fused, u = reshape(
W_1 o_1 + W_2 o_2 + sum_h W_h flatten(o_1h o_2h^T) + b): the paper's fusion with l d outputs for its one.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs, elementwise_cost, linear_cost, product_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import VectorToEmbeddings, Widths, mlp, mlp_cost, mlp_tape
from dhen.tape import Tape


class TwoStreamConfig(DropoutBlockConfig):
    """Two gated MLPs and their fusion."""

    kind: Literal["two_stream"] = "two_stream"
    first: Widths = Field(default=(128, 64), min_length=1)
    """Widths of one MLP."""
    second: Widths = Field(default=(64, 32), min_length=1)
    """Widths of the other."""
    heads: int = Field(default=4, gt=0)
    """Number of pieces of both outputs whose products are taken; must divide the last widths of both."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        ends = self._ends
        if any(width % self.heads for width in ends):
            fitting = [n for n in range(1, min(ends) + 1) if not any(width % n for width in ends)]
            raise ValueError(
                f"heads={self.heads} does not divide the last widths {ends[0]} and {ends[1]}; "
                f"heads that do: {fitting}"
            )
        return self

    @property
    def fused(self) -> int:
        """Length of what is fused: both outputs, and the products of their heads."""
        first, second = self._ends
        return first + second + first * second // self.heads

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            TwoStreams(shape, self, dropout=dropout),
            VectorToEmbeddings(self.fused, shape.out, shape.dim),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Gates, both MLPs, the products of their heads, the fusion."""
        m, width, (first, second) = shape.embeddings, shape.width, self._ends
        return (
            linear_cost("gates", width, 2 * m),
            elementwise_cost("gates.sigmoid", 2 * m, flops_each=4),
            elementwise_cost("gated", 2 * width),
            *mlp_cost("first", width, self.first),
            *mlp_cost("second", width, self.second),
            product_cost("products", first, 1, second // self.heads),
            linear_cost("fusion", self.fused, shape.out_width),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Gates, both MLPs, the products of their heads, the fusion."""
        m, width, (first, second) = shape.embeddings, shape.width, self._ends
        gates = tape.operation(2 * m, [linear_tape(tape, x, width, 2 * m)], saves_output=True)
        gates = tape.operation(2 * m, [gates])
        streams = []
        for gate, widths in zip(tape.unbind(gates, 2), (self.first, self.second), strict=True):
            gated = tape.operation(width, [x, gate], saves=[x, gates], backward_running=tape.held(width))
            streams.append(mlp_tape(tape, gated, width, widths, dropout=dropout))
            tape.refer(gates)
        products = tape.operation(first * second // self.heads, streams, saves=streams)
        fused = tape.concat([*streams, products])
        tape.refer(*streams, products)
        return linear_tape(tape, fused, self.fused, shape.out_width)

    @property
    def _ends(self) -> tuple[int, int]:
        return self.first[-1], self.second[-1]


class TwoStreams(nn.Module):
    """x_BMD -> (B, `fused`)."""

    def __init__(self, shape: BlockShape, config: TwoStreamConfig, *, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.heads = config.heads
        self.gates = Linear(width, 2 * shape.embeddings)
        self.first = mlp(width, config.first, dropout=dropout)
        self.second = mlp(width, config.second, dropout=dropout)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """o_1, o_2, and the products of their heads."""
        gates = 2.0 * self.gates(x_BMD.flatten(1)).sigmoid()
        for_first, for_second = gates.unsqueeze(2).chunk(2, dim=1)
        first = self.first((x_BMD * for_first).flatten(1))
        second = self.second((x_BMD * for_second).flatten(1))
        batch = x_BMD.shape[0]
        pieces = batch * self.heads
        products = torch.bmm(first.view(pieces, -1, 1), second.view(pieces, 1, -1))
        return torch.cat((first, second, products.view(batch, -1)), dim=1)
