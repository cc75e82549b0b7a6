"""A gate on each embedding, from the means of all of them (after squeeze-and-excitation, arXiv 1709.01507).

An interaction module maps x_BMD, M embeddings of length D for each of B examples, to u_BLD: L embeddings of the
same length. Its config is a frozen value that builds the torch module and knows its cost; `kind` is the name that
spaces and configurations use. A module that is changed so that it computes something else needs another name, as
results are kept by it.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.parts import EmbeddingProjection, projection_cost


class GateConfig(BlockConfig):
    """A gate and its projection; nothing to set."""

    kind: Literal["gate"] = "gate"

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(Gate(shape.embeddings), EmbeddingProjection(shape.embeddings, shape.out))

    def cost(self, shape: BlockShape) -> Costs:
        """The gate's linear map, the products, the projection."""
        m, d = shape.embeddings, shape.dim
        return (
            linear_cost("gate", m, m),
            elementwise_cost("gate.product", 2 * m * d + m),
            projection_cost("projection", m, shape.out, d),
        )


class Gate(nn.Module):
    """x_BMD -> x_BMD."""

    def __init__(self, embeddings: int) -> None:
        super().__init__()
        self.gate = nn.Linear(embeddings, embeddings)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Each embedding times a number between 0 and 1."""
        gated: Tensor = x_BMD * self.gate(x_BMD.mean(dim=2)).sigmoid().unsqueeze(2)
        return gated
