"""DCN-V2's cross network (arXiv 2008.13535, equation 1): x_(i+1) = x_0 * (W_i x_i + b_i) + x_i.

Over the flattened embeddings, `layers` times, then projected to l embeddings, W in R^(m x l). With a `rank`,
W_i = U_i V_i^T (equation 2). Not one of the DHEN paper's five; its own deep cross network is
`dhen/blocks/dcn.py`, DCN-V2's mixture of low-rank layers `dhen/blocks/dcn_mix.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import (
    EmbeddingProjection,
    crosses_tape,
    projection_cost,
    projection_tape,
    split_in_turn,
    undivided,
)
from dhen.ops.split import RankGroup, how_split
from dhen.tape import Tape


class DcnV2Config(BlockConfig):
    """A cross network of a few layers and its projection."""

    kind: Literal["dcn_v2"] = "dcn_v2"
    layers: int = Field(default=1, gt=0, le=32)
    """Number of cross layers; n of them reach interactions of order n + 1."""
    # left out of plain data if it is 0, so that jobs of before it was a field keep their fingerprint
    rank: int = Field(default=0, ge=0, le=65_536, exclude_if=lambda rank: rank == 0)
    """Rank of each layer's matrix; 0: a full matrix."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            CrossNetwork(shape, self.layers, self.rank), EmbeddingProjection(shape.embeddings, shape.out)
        )

    def cost(self, shape: BlockShape) -> Costs:
        """One matmul per cross layer, two with a rank, and the projection."""
        width = shape.width
        crosses = [
            row
            for index in range(self.layers)
            for row in (
                *self._matrix_cost(f"cross{index}", width),
                elementwise_cost(f"cross{index}.product", width, flops_each=2),
            )
        ]
        return (*crosses, projection_cost("projection", shape.embeddings, shape.out, shape.dim))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """A matmul (two with a rank) and a product with x_0 per cross layer, and the projection."""
        width = shape.width

        def write_matrix(x: int, saved: int) -> int:
            if not self.rank:
                (how,) = how_split([(width, width)], tape.ranks)
                return linear_tape(tape, x, width, width, saved=saved, how=how)
            down, up = how_split([(width, self.rank), (self.rank, width)], tape.ranks)
            low = linear_tape(tape, x, width, self.rank, bias=False, saved=saved, how=down)
            return linear_tape(tape, low, self.rank, width, how=up)

        x = crosses_tape(tape, x, width, self.layers, write_matrix)
        return projection_tape(tape, x, shape.embeddings, shape.out, shape.dim)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """Each rank has some rows of every W_i, or with a rank some of that rank."""
        assert isinstance(module, nn.Sequential)
        network = module[0]
        assert isinstance(network, CrossNetwork)
        for cross in network.crosses:
            split_in_turn([*cross] if isinstance(cross, nn.Sequential) else [cross], group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """A width, or a rank, that the ranks do not divide."""
        width = shape.width
        return undivided((self.rank, width) if self.rank else (width,), ranks)

    def _matrix_cost(self, name: str, width: int) -> Costs:
        if not self.rank:
            return (linear_cost(name, width, width),)
        down = linear_cost(f"{name}.down", width, self.rank, bias=False)
        return (down, linear_cost(f"{name}.up", self.rank, width))


class CrossNetwork(nn.Module):
    """x_BMD -> x_BMD after a few cross layers."""

    def __init__(self, shape: BlockShape, layers: int, rank: int) -> None:
        super().__init__()
        width = shape.width
        self.crosses = nn.ModuleList(_matrix(width, rank) for _ in range(layers))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """DCN-V2, equation 1, on the flattened embeddings."""
        x0 = x = x_BMD.flatten(1)
        for cross in self.crosses:
            x = torch.addcmul(x, x0, cross(x))
        return x.view_as(x_BMD)


def _matrix(width: int, rank: int) -> nn.Module:
    """W x + b, with W = U V^T if there is a rank."""
    if not rank:
        return Linear(width, width)
    return nn.Sequential(Linear(width, rank, bias=False), Linear(rank, width))
