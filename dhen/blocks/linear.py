"""Linear: u = W x, W in R^(m x l) (DHEN paper, section 3.2.4)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape


class LinearConfig(BlockConfig):
    """A linear map over embeddings; nothing to set."""

    kind: Literal["linear"] = "linear"

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """The projection alone."""
        return EmbeddingProjection(shape.embeddings, shape.out)

    def cost(self, shape: BlockShape) -> Costs:
        """One matmul."""
        return (projection_cost("projection", shape.embeddings, shape.out, shape.dim),)

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The projection alone."""
        return projection_tape(tape, x, shape.embeddings, shape.out, shape.dim)
