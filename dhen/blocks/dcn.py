"""The DHEN paper's deep cross network: x_(l+1) = x_0 (x_l^T w_l) + b_l, u = reshape(W_m x_n).

DCN's cross layers (Wang et al., arXiv 1708.05123, equation 3) as the DHEN paper uses them (section 3.2.5; the
formula is from a secondary source): x_0 in R^(m d) are the flattened embeddings, w_l and b_l vectors of that
length, W_m in R^((l d) x (m d)) without a bias. DCN's residual, + x_l, is left out, as in the paper: the layer's
shortcut takes its place. So x_n is x_0 times a number, plus b_(n-1), and that number is a polynomial of degree
n in x_0: n layers reach interactions of order n + 1, all of them along x_0. `dhen/blocks/cross.py` is another
reading of the same section, `dhen/blocks/dcn_v2.py` the later cross network with matrices.

Shapes: B examples, M embeddings, D their dimension, V = M D, L embeddings out.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import Costs, elementwise_cost, linear_cost
from dhen.ops.linear import linear_tape
from dhen.ops.parts import VectorToEmbeddings, undivided
from dhen.ops.split import ParameterSplit, RankGroup, keep_part, own, summed_both_ways
from dhen.tape import Tape


class DcnConfig(BlockConfig):
    """Cross layers, each with a vector of weights, and W_m."""

    kind: Literal["dcn"] = "dcn"
    layers: int = Field(default=3, gt=0, le=32)
    """Number of cross layers; n of them reach interactions of order n + 1."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        width = shape.width
        return nn.Sequential(
            CrossLayers(width, self.layers), VectorToEmbeddings(width, shape.out, shape.dim, bias=False)
        )

    def cost(self, shape: BlockShape) -> Costs:
        """A dot product, a product with x_0 and a bias per cross layer, and W_m."""
        width = shape.width
        crosses = [
            row
            for index in range(self.layers)
            for row in (
                linear_cost(f"cross{index}", width, 1, bias=False),
                elementwise_cost(f"cross{index}.product", width, flops_each=2, parameters=width),
            )
        ]
        return (*crosses, linear_cost("w_m", width, shape.out_width, bias=False))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """A dot product, and a product with x_0, per cross layer; W_m."""
        whole, split = shape.width, self.whole(shape, tape.ranks) is None
        width, first = whole, tape.view(x)
        if split:
            tape.compute_elsewhere(2.0 * whole * self.layers)
            tape.send("all_gather", whole, forward=False)
            width = whole // tape.ranks
            x = first = tape.operation(width, [first], backward_running=tape.held(whole))
        current, saved = first, x
        for _ in range(self.layers):
            dot = tape.operation(1, [current], saves=[saved], parameters=[(width, 1)])
            if split:
                tape.send("all_reduce", 1)
                tape.send("all_reduce", 1, forward=False)
            # the gradient of x_l^T w_l is a sum over x_0 times the output's gradient: both lie there meanwhile
            current = saved = tape.operation(
                width,
                [first, dot],
                saves=[x, dot],
                backward_running=tape.held(2 * width),
                parameters=[(width, 1)],
            )
        return linear_tape(tape, current, whole, shape.out_width, bias=False, how="rows" if split else None)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """Each rank has a part of x_0 and of every layer's vectors; dot products are summed up, and so is W_m."""
        assert isinstance(module, nn.Sequential)
        layers, to_embeddings = module
        assert isinstance(layers, CrossLayers)
        assert isinstance(to_embeddings, VectorToEmbeddings)
        if to_embeddings.linear.in_features % group.size == 0:
            layers.split(group)
            to_embeddings.linear.split("rows", group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """A width that the ranks do not divide."""
        return undivided((shape.width,), ranks)


class CrossLayers(nn.Module):
    """x_BMD -> x_BV after a few cross layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        # x^T w begins with variance 1 for an x of unit variance: a layer puts out what is as large as x_0
        self.weights = nn.ParameterList(torch.randn(width) * width**-0.5 for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(layers))
        self.group: RankGroup | None = None

    def split(self, group: RankGroup) -> None:
        """Keeps this rank's part of the vectors, and puts out its part of x_n."""
        self.group = group
        for vectors in (self.weights, self.biases):
            for place in range(len(vectors)):
                keep_part(vectors, str(place), ParameterSplit(0), group)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """x_(l+1) = x_0 (x_l^T w_l) + b_l."""
        x0_BV = x_BMD.flatten(1)
        if self.group is not None:
            x0_BV = own(x0_BV, self.group)
        x_BV = x0_BV
        for w_V, b_V in zip(self.weights, self.biases, strict=True):
            dot_B1 = x_BV @ w_V.unsqueeze(1)
            if self.group is not None:
                dot_B1 = summed_both_ways(dot_B1, self.group)
            x_BV = torch.addcmul(b_V, x0_BV, dot_B1)
        return x_BV
