"""MaskNet's mask block (arXiv 2102.07619, section 3.3, equations 3 to 8).

v = ReLU(LN(W (mask(x) * LN_emb(x)))), over the flattened embeddings, each normalised by itself; the mask comes
from the instance through a wider hidden layer, mask(x) = W_2 ReLU(W_1 x + b_1) + b_2. u = reshape(W_m v).
Several in a layer are the paper's parallel MaskNet, layers of them its serial one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import Costs, elementwise_cost, linear_cost, within
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.norm import LayerNorm, norm_cost, norm_tape
from dhen.ops.parts import VectorToEmbeddings
from dhen.tape import Tape


class MaskBlockConfig(DropoutBlockConfig):
    """A mask from the instance, a hidden layer, and W_m."""

    kind: Literal["mask_block"] = "mask_block"
    aggregation: int = Field(default=128, gt=0, le=65_536)
    """Width of the layer from which the mask comes; in the paper one to five times the input's."""
    hidden: int = Field(default=64, gt=0, le=65_536)
    """Width of the hidden layer v, which W_m maps to embeddings."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            MaskBlock(shape, self, dropout=dropout), VectorToEmbeddings(self.hidden, shape.out, shape.dim)
        )

    def cost(self, shape: BlockShape) -> Costs:
        """The mask's two maps, the embeddings' norms, the products, the hidden layer, W_m."""
        width = shape.width
        return (
            linear_cost("mask0", width, self.aggregation),
            elementwise_cost("mask0.relu", self.aggregation),
            linear_cost("mask1", self.aggregation, width),
            *norm_cost("layer", shape.embeddings, shape.dim),
            elementwise_cost("product", width),
            linear_cost("hidden", width, self.hidden),
            *within("hidden", norm_cost("layer", 1, self.hidden)),
            elementwise_cost("hidden.relu", self.hidden),
            linear_cost("w_m", self.hidden, shape.out_width),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The mask, the norms, their product, the hidden layer, W_m."""
        width, hidden = shape.width, self.hidden
        aggregated = linear_tape(tape, x, width, self.aggregation, relu=True, p=dropout)
        mask = linear_tape(tape, aggregated, self.aggregation, width)
        normed = norm_tape(tape, x, shape.embeddings, shape.dim)
        masked = tape.operation(width, [mask, normed], saves=[mask, normed])
        tape.refer(mask, normed)
        v = norm_tape(tape, linear_tape(tape, masked, width, hidden), 1, hidden)
        v = tape.operation(hidden, [v], saves_output=True)
        return linear_tape(tape, v, hidden, shape.out_width)


class MaskBlock(nn.Module):
    """x_BMD -> (B, hidden)."""

    def __init__(self, shape: BlockShape, config: MaskBlockConfig, *, dropout: float) -> None:
        super().__init__()
        width = shape.width
        self.mask = nn.Sequential(
            Linear(width, config.aggregation, relu=True, dropout=dropout),
            Linear(config.aggregation, width),
        )
        self.norm = LayerNorm(shape.dim)
        self.hidden = nn.Sequential(Linear(width, config.hidden), LayerNorm(config.hidden))

    def forward(self, x_BMD: Tensor) -> Tensor:
        """MaskNet, equation 8."""
        masked: Tensor = self.mask(x_BMD.flatten(1)) * self.norm(x_BMD).flatten(1)
        v: Tensor = self.hidden(masked).relu()
        return v
