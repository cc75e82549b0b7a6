"""PNN's product layer and MLP (arXiv 1611.00144, equations 4 to 11): v = MLP(ReLU(l_z + l_p + b)).

l_z = W_z flatten(x) is the linear signal. Products, both in the paper's cheap forms: inner,
l_p^n = |sum_i theta^n_i x_i|^2, which weighs <x_i, x_j> by theta_i theta_j; and outer, l_p^n = <W^n, f f^T> with
f = sum_i x_i. u = reshape(W_m v). All inner products with a weight each are `dhen/blocks/dlrm.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import CostRow, Costs, elementwise_cost, linear_cost, product_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import EmbeddingProjection, Tower, Widths, projection_cost, projection_tape
from dhen.tape import Tape


class PnnConfig(DropoutBlockConfig):
    """Products beside a linear signal, an MLP, and W_m."""

    kind: Literal["pnn"] = "pnn"
    products: Literal["inner", "outer", "both"] = "both"
    """Which products of embeddings are taken."""
    mlp: Widths = Field(default=(128, 64), min_length=1)
    """Widths of the product layer and of the MLP above it; the last is the length of v, which W_m maps to
    embeddings."""

    def tower(self, shape: BlockShape) -> Tower:
        """The MLP, W_m."""
        return Tower(self.mlp[0], self.mlp[1:], shape.out, shape.dim)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        products = ProductLayer(shape, self.mlp[0], self.products)
        return nn.Sequential(products, *self.tower(shape).build(dropout=dropout))

    def cost(self, shape: BlockShape) -> Costs:
        """The linear signal, the products, the MLP, W_m."""
        m, d, first = shape.embeddings, shape.dim, self.mlp[0]
        rows: list[CostRow] = [linear_cost("linear", m * d, first)]
        if self.products != "outer":
            rows.append(projection_cost("inner", m, first, d))
            rows.append(elementwise_cost("inner.norms", first * d, flops_each=2))
        if self.products != "inner":
            rows.append(elementwise_cost("outer.sum", (m - 1) * d))
            rows.append(product_cost("outer.product", d, 1, d))
            rows.append(linear_cost("outer", d * d, first, bias=False))
        rows.append(elementwise_cost("relu", first, flops_each=3))
        return (*rows, *self.tower(shape).cost())

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The linear signal, the products added to it, ReLU, the MLP, W_m."""
        m, d, first = shape.embeddings, shape.dim, self.mlp[0]
        signal = linear_tape(tape, x, m * d, first)
        if self.products != "outer":
            mixes = projection_tape(tape, x, m, first, d)
            squares = tape.operation(
                first * d, [mixes], saves=[mixes], backward_running=tape.held(2 * first * d)
            )
            tape.refer(mixes)
            norms = tape.operation(first, [squares], passes=True)
            signal = tape.add(signal, norms)
        if self.products != "inner":
            total = tape.operation(d, [x], passes=True)
            outer = tape.operation(d * d, [total, total], saves=[total])
            signal = tape.add(signal, linear_tape(tape, outer, d * d, first, bias=False))
        signal = tape.operation(first, [signal], saves_output=True)
        return self.tower(shape).write(tape, signal, dropout=dropout)


class ProductLayer(nn.Module):
    """x_BMD -> (B, width)."""

    def __init__(self, shape: BlockShape, width: int, products: str) -> None:
        super().__init__()
        self.linear = Linear(shape.width, width)
        self.inner = EmbeddingProjection(shape.embeddings, width) if products != "outer" else None
        self.outer = Linear(shape.dim**2, width, bias=False) if products != "inner" else None

    def forward(self, x_BMD: Tensor) -> Tensor:
        """ReLU(l_z + l_p + b)."""
        signal: Tensor = self.linear(x_BMD.flatten(1))
        if self.inner is not None:
            signal = signal + self.inner(x_BMD).square().sum(dim=2)
        if self.outer is not None:
            total_BD = x_BMD.sum(dim=1)
            outer_BDD = torch.bmm(total_BD.unsqueeze(2), total_BD.unsqueeze(1))
            signal = signal + self.outer(outer_BDD.flatten(1))
        return signal.relu()
