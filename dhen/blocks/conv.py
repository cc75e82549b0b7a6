"""Convolution: u = W Conv2d(x), the embeddings seen as an image M x D (DHEN paper, section 3.2.3).

One channel in, a few out, odd kernels with the padding that keeps M x D; W in R^(l x c m) mixes the
embeddings of all channels. The paper's is one convolution with W in R^(l x m): `channels: 1, activation: none`.

Shapes: B examples, C channels, M embeddings, D their dimension.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import MATMUL, CostRow, Costs, elementwise_cost
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.ops.split import ParameterSplit, RankGroup, keep_part, sums_gradients
from dhen.tape import Tape


class ConvConfig(BlockConfig):
    """A convolution, its activation, and its projection."""

    kind: Literal["conv"] = "conv"
    channels: int = Field(default=4, gt=0, le=65_536)
    """Number of output channels; the paper has 1."""
    kernel: int = Field(default=3, gt=0, le=4095)
    """Side of the square kernel; an odd number."""
    # left out of plain data if it is the default, so that jobs of before it was a field keep their fingerprint
    activation: Literal["none", "relu"] = Field(
        default="relu", exclude_if=lambda activation: activation == "relu"
    )
    """What follows the convolution: ReLU, or nothing, as in the paper."""

    @field_validator("kernel")
    @classmethod
    def _odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError(f"a convolution needs an odd kernel; {kernel - 1} or {kernel + 1} would work")
        return kernel

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            Conv(self.channels, self.kernel, relu=self.activation == "relu"),
            EmbeddingProjection(self.channels * shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """The convolution counts its padding's products too, as torch does."""
        c, k, values = self.channels, self.kernel, shape.embeddings * shape.dim
        convolution = CostRow(
            name="conv", kind=MATMUL, flops=2.0 * c * k * k * values, parameters=c * k * k + c
        )
        relu = (elementwise_cost("conv.relu", c * values),) if self.activation == "relu" else ()
        return (
            convolution,
            *relu,
            projection_cost("projection", c * shape.embeddings, shape.out, shape.dim),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The convolution, its activation, the projection."""
        c, k, m, d = self.channels, self.kernel, shape.embeddings, shape.dim
        split = self.whole(shape, tape.ranks) is None
        if split:
            tape.compute_elsewhere(2.0 * c * k * k * m * d)
            tape.send("all_reduce", m * d, forward=False)
            c //= tape.ranks
        entry = tape.view(x) if split else x
        image = tape.operation(c * m * d, [entry], saves=[x], parameters=[(c, k * k), (c, 1)])
        if self.activation == "relu":
            image = tape.operation(c * m * d, [image], saves_output=True)
        return projection_tape(tape, image, self.channels * m, shape.out, d, split=split)

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """Each rank has some channels, and the projection of what they put out."""
        assert isinstance(module, nn.Sequential)
        for part in module:
            assert isinstance(part, Conv | EmbeddingProjection)
            if self.channels % group.size == 0:
                part.split(group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Channels that the ranks do not divide."""
        if ranks > 1 and self.channels % ranks == 0:
            return None
        return f"{ranks} does not divide channels={self.channels}"


class Conv(nn.Module):
    """x_BMD -> (B, C M, D)."""

    def __init__(self, channels: int, kernel: int, *, relu: bool) -> None:
        super().__init__()
        self.relu = relu
        self.conv = nn.Conv2d(1, channels, kernel, padding=kernel // 2)
        self.group: RankGroup | None = None

    def split(self, group: RankGroup) -> None:
        """Keeps this rank's part of the channels."""
        self.group = group
        for name in ("weight", "bias"):
            keep_part(self.conv, name, ParameterSplit(0), group)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """The channels one after another along the embeddings."""
        if self.group is not None:
            x_BMD = sums_gradients(x_BMD, self.group)
        image_BCMD: Tensor = self.conv(x_BMD.unsqueeze(1))
        return (image_BCMD.relu() if self.relu else image_BCMD).flatten(1, 2)
