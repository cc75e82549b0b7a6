"""Self-attention: u = W TransformerEncoderLayer(x), W in R^(m x l) (DHEN paper, section 3.2.2).

The encoder layer is torch's own (post-norm, ReLU), its tokens the embeddings; no positions are added,
since each embedding's place already says which feature it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import (
    ATTENTION,
    NORM_FLOPS,
    SOFTMAX_FLOPS,
    Costs,
    elementwise_cost,
    linear_cost,
    product_cost,
)
from dhen.parts import EmbeddingProjection, projection_cost


class AttentionConfig(BlockConfig):
    """A Transformer encoder layer and its projection."""

    kind: Literal["attention"] = "attention"
    heads: int = Field(default=2, gt=0)
    """Attention heads; must divide the embedding dimension."""
    feedforward: int = Field(default=64, gt=0)
    """Width of the encoder layer's feed-forward part."""

    def check(self, dim: int) -> None:
        """Heads divide the embedding dimension."""
        if dim % self.heads:
            fitting = [n for n in range(1, dim + 1) if dim % n == 0]
            raise ValueError(
                f"attention with heads={self.heads} does not divide embedding_dim={dim}; "
                f"heads that do: {fitting}"
            )

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            Encoder(shape.dim, self.heads, self.feedforward, dropout=dropout, batch_first=True),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Projections, the two products of attention, softmax, feed-forward, norms."""
        m, d, f = shape.embeddings, shape.dim, self.feedforward
        return (
            linear_cost("qkv", d, 3 * d, positions=m),
            product_cost("scores", m, d, m, kind=ATTENTION),
            elementwise_cost("softmax", self.heads * m * m, flops_each=SOFTMAX_FLOPS),
            product_cost("values", m, m, d, kind=ATTENTION),
            linear_cost("output", d, d, positions=m),
            linear_cost("feedforward0", d, f, positions=m),
            elementwise_cost("feedforward0.relu", m * f),
            linear_cost("feedforward1", f, d, positions=m),
            elementwise_cost("norms", 2 * m * d, flops_each=NORM_FLOPS + 1, parameters=4 * d),
            projection_cost("projection", m, shape.out, d),
        )


class Encoder(nn.TransformerEncoderLayer):
    """torch's encoder layer, its attention unfused on the CPU.

    The fused CPU kernel is made for long sequences: for tens of embeddings and heads of 8 to 16 it took
    1.3 to 2.8 times as long, forward and backward (2 cores, 2026-11-21, docs/log.md).
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """x_BMD -> x_BMD."""
        if src.device.type != "cpu":
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
