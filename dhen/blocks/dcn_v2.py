"""DCN-V2's full-matrix cross network (arXiv 2008.13535, equation 1): x_(i+1) = x_0 * (W_i x_i + b_i) + x_i.

Over the flattened embeddings, `layers` times, then projected to l embeddings, W in R^(m x l). Not one
of the DHEN paper's five; its own deep cross network is `dhen/blocks/cross.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.linear import Linear, linear_tape
from dhen.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape


class DcnV2Config(BlockConfig):
    """A cross network of a few layers and its projection."""

    kind: Literal["dcn_v2"] = "dcn_v2"
    layers: int = Field(default=1, gt=0, le=32)
    """Cross layers; n of them reach interactions of order n + 1."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            CrossNetwork(shape, self.layers), EmbeddingProjection(shape.embeddings, shape.out)
        )

    def cost(self, shape: BlockShape) -> Costs:
        """One matmul a cross layer, and the projection."""
        width = shape.embeddings * shape.dim
        crosses = [
            row
            for index in range(self.layers)
            for row in (
                linear_cost(f"cross{index}", width, width),
                elementwise_cost(f"cross{index}.product", width, flops_each=2),
            )
        ]
        return (*crosses, projection_cost("projection", shape.embeddings, shape.out, shape.dim))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """A matmul and a product with x_0 a cross layer, and the projection."""
        width, first = shape.embeddings * shape.dim, tape.view(x)
        current, saved = first, x
        for _ in range(self.layers):
            crossed = linear_tape(tape, current, width, width, saved=saved)
            product = tape.operation(
                width, [first, crossed], saves=[x, crossed], backward_running=tape.held(width), view=True
            )
            current = saved = tape.add(current, product)
        x = current
        return projection_tape(tape, x, shape.embeddings, shape.out, shape.dim)


class CrossNetwork(nn.Module):
    """x_BMD -> x_BMD after a few cross layers."""

    def __init__(self, shape: BlockShape, layers: int) -> None:
        super().__init__()
        width = shape.embeddings * shape.dim
        self.crosses = nn.ModuleList(Linear(width, width) for _ in range(layers))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """DCN-V2, equation 1, on the flattened embeddings."""
        x0 = x = x_BMD.flatten(1)
        for cross in self.crosses:
            x = torch.addcmul(x, x0, cross(x))
        return x.view_as(x_BMD)
