"""GDCN's gated cross network (arXiv 2311.04635, equation 3): c_(i+1) = c_0 * (W c_i + b) * sigmoid(V c_i) + c_i.

DCN-V2's cross layer (`dhen/blocks/dcn_v2.py`) with a gate on every product, over the flattened embeddings.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import EmbeddingProjection, crosses_tape, projection_cost, projection_tape
from dhen.tape import Tape


class GatedCrossConfig(BlockConfig):
    """A gated cross network of a few layers and its projection."""

    kind: Literal["gated_cross"] = "gated_cross"
    layers: int = Field(default=1, gt=0, le=32)
    """Number of cross layers; n of them reach interactions of order n + 1."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            GatedCrossNetwork(shape.width, self.layers),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Two matmuls a cross layer, and the projection."""
        width = shape.width
        crosses = [
            row
            for index in range(self.layers)
            for row in (
                linear_cost(f"cross{index}", width, width),
                linear_cost(f"gate{index}", width, width, bias=False),
                elementwise_cost(f"cross{index}.product", width, flops_each=4),
            )
        ]
        return (*crosses, projection_cost("projection", shape.embeddings, shape.out, shape.dim))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Two matmuls a cross layer, the gate, the product with c_0, and the projection."""
        width = shape.width

        def write_gated(x: int, saved: int) -> int:
            crossed = linear_tape(tape, x, width, width, saved=saved)
            logits = linear_tape(tape, x, width, width, bias=False, saved=saved)
            gate = tape.operation(width, [logits], saves_output=True)
            return tape.operation(width, [crossed, gate], saves=[crossed, gate])

        x = crosses_tape(tape, x, width, self.layers, write_gated)
        return projection_tape(tape, x, shape.embeddings, shape.out, shape.dim)


class GatedCrossNetwork(nn.Module):
    """x_BMD -> x_BMD after a few gated cross layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(Linear(width, width) for _ in range(layers))
        self.gates = nn.ModuleList(Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """GDCN, equation 3, on the flattened embeddings."""
        x0 = x = x_BMD.flatten(1)
        for cross, gate in zip(self.crosses, self.gates, strict=True):
            x = torch.addcmul(x, x0, cross(x) * gate(x).sigmoid())
        return x.view_as(x_BMD)
