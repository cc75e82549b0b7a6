"""xDeepFM's compressed interaction network (arXiv 1803.05170, equation 6).

Layer k has feature maps x^k_h = sum_ij W^(k,h)_ij (x^(k-1)_i * x^0_j), products by element, without an
activation, as the paper found best; its order of interaction is k + 1. The maps of all layers, which the
paper sums over their dimensions into the logit, are projected to l embeddings here.

Shapes: B examples, M embeddings, D their dimension, I feature maps of a layer, H feature maps of the next.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs
from dhen.ops.pairwise import pair_mix, pair_mix_cost, pair_mix_tape
from dhen.ops.parts import EmbeddingProjection, Widths, projection_cost, projection_tape
from dhen.tape import Tape


class CinConfig(BlockConfig):
    """A compressed interaction network and its projection."""

    kind: Literal["cin"] = "cin"
    maps: Widths = Field(default=(16, 16), min_length=1)
    """Number of feature maps of each layer; n layers reach interactions of order n + 1."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            CompressedInteraction(shape.embeddings, self.maps),
            EmbeddingProjection(sum(self.maps), shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Two products per layer, and the projection."""
        m, d = shape.embeddings, shape.dim
        layers = [
            row
            for index, (i, h) in enumerate(pairwise((m, *self.maps)))
            for row in pair_mix_cost(f"layer{index}", h, d, i, m, parameters=h * i * m)
        ]
        return (*layers, projection_cost("projection", sum(self.maps), shape.out, d))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The embeddings' other order in memory, the layers, their maps joined, the projection."""
        d = shape.dim
        first = tape.copy(x)
        layers = [first]
        for h in self.maps:
            layers.append(pair_mix_tape(tape, layers[-1], first, h, d))
        maps = tape.concat(layers[1:]) if len(self.maps) > 1 else layers[1]
        tape.refer(*layers)
        return projection_tape(tape, maps, sum(self.maps), shape.out, d)


class CompressedInteraction(nn.Module):
    """x_BMD -> (B, H, D), H feature maps of all layers together."""

    def __init__(self, embeddings: int, maps: Widths) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.init.xavier_uniform_(torch.empty(h, i * embeddings)).view(h, i, embeddings)
            for i, h in pairwise((embeddings, *maps))
        )

    def forward(self, x_BMD: Tensor) -> Tensor:
        """xDeepFM, equation 6, with embeddings in the last dimension."""
        first = maps_BDH = x_BMD.mT.contiguous()
        layers = []
        for weight_HIM in self.weights:
            maps_BDH = pair_mix(maps_BDH, first, weight_HIM)
            layers.append(maps_BDH)
        return (torch.cat(layers, dim=2) if len(layers) > 1 else maps_BDH).mT
