"""Self-attention: u = W TransformerEncoderLayer(x), W in R^(m x l) (DHEN paper, section 3.2.2).

The encoder layer (post-norm, ReLU) has the embeddings for tokens; no positions are added, since each
embedding's place already says which feature it is.

Shapes: B examples, M embeddings (the tokens), D their dimension; N examples and heads, one row per head of each
example.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.blocks.base import BlockShape, DropoutBlockConfig
from dhen.cost import (
    ATTENTION,
    NORM_FLOPS,
    SOFTMAX_FLOPS,
    Costs,
    elementwise_cost,
    linear_cost,
    product_cost,
)
from dhen.memory.tape import FP32_BYTES, MASK_BYTES, Tape
from dhen.ops.block_attention import BlockAttention
from dhen.ops.block_attention_cost import fused_attention_tape
from dhen.ops.block_layout import BlockLayout
from dhen.ops.dropout import drop, dropout_scale
from dhen.ops.linear import Linear, linear, linear_shapes, linear_tape
from dhen.ops.norm import LayerNorm, norm_tape
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape


class AttentionConfig(DropoutBlockConfig):
    """A Transformer encoder layer and its projection."""

    kind: Literal["attention"] = "attention"
    heads: int = Field(default=2, gt=0)
    """Number of attention heads; must divide the embedding dimension."""
    feedforward: int = Field(default=64, gt=0)
    """Width of the encoder layer's feed-forward part."""

    def check(self, dim: int) -> None:
        """Heads divide the embedding dimension."""
        check_heads(self.kind, self.heads, dim)

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            Encoder(shape.dim, self.heads, self.feedforward, dropout=dropout),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Projections, the two products of attention, softmax, feed-forward, norms."""
        m, d = shape.embeddings, shape.dim
        products = (
            product_cost("scores", m, d, m, kind=ATTENTION),
            elementwise_cost("softmax", self.heads * m * m, flops_each=SOFTMAX_FLOPS),
            product_cost("values", m, m, d, kind=ATTENTION),
        )
        return encoder_cost(shape, self.feedforward, products)

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Attention, feed-forward, each with its residual and norm; the projection."""
        attended = self._write_attention(tape, x, shape.embeddings, shape.dim, dropout)
        return encoder_tape(tape, x, attended, shape, self.feedforward, dropout=dropout)

    def _write_attention(self, tape: Tape, x: int, m: int, d: int, dropout: float) -> int:
        """softmax(q k^T / sqrt(d)) v. With one head its rearrangements are views."""
        heads = self.heads
        if tape.device == "cuda":  # fused: q, k, v, its output and one number per row of scores
            return fused_attention_tape(tape, linear_tape(tape, x, d, 3 * d, positions=m), m, d, heads)
        qkv = scaled_qkv_tape(tape, x, m, d)
        split = tape.copy(qkv) if heads > 1 else qkv
        q, k, v = tape.unbind(split, 3)
        n = heads * m * m
        scores = tape.operation(n, [q, k], saves=[split])
        probabilities = tape.operation(
            n, [tape.cast(scores, FP32_BYTES)], saves_output=True, itemsize=FP32_BYTES
        )
        probabilities = tape.cast(probabilities, tape.itemsize)
        if dropout:
            mask = tape.scratch(n, itemsize=MASK_BYTES)
            probabilities = tape.operation(n, [probabilities], saves=[mask])
        values = tape.operation(m * d, [probabilities, v], saves=[probabilities, split])
        values = tape.copy(values) if heads > 1 else values
        tape.refer(qkv)
        return values


def check_heads(kind: str, heads: int, dim: int) -> None:
    """Raises ValueError where so many heads do not divide the embedding dimension."""
    if dim % heads:
        fitting = [n for n in range(1, dim + 1) if dim % n == 0]
        raise ValueError(
            f"{kind} with heads={heads} does not divide embedding_dim={dim}; heads that do: {fitting}"
        )


def encoder_cost(shape: BlockShape, feedforward: int, products: Costs) -> Costs:
    """Returns the cost of `Encoder` and its projection, with these products of attention."""
    m, d, f = shape.embeddings, shape.dim, feedforward
    return (
        linear_cost("qkv", d, 3 * d, positions=m),
        *products,
        linear_cost("output", d, d, positions=m),
        linear_cost("feedforward0", d, f, positions=m),
        elementwise_cost("feedforward0.relu", m * f),
        linear_cost("feedforward1", f, d, positions=m),
        elementwise_cost("norms", 2 * m * d, flops_each=NORM_FLOPS + 1, parameters=4 * d),
        projection_cost("projection", m, shape.out, d),
    )


def encoder_tape(
    tape: Tape, x: int, attended: int, shape: BlockShape, feedforward: int, *, dropout: float
) -> int:
    """Writes down `Encoder` after its attention, and its projection; the tensor u_BLD."""
    m, d, f = shape.embeddings, shape.dim, feedforward
    attended = linear_tape(tape, attended, d, d, positions=m, p=dropout)
    x = norm_tape(tape, tape.add(x, attended), m, d)
    hidden = linear_tape(tape, x, d, f, positions=m, relu=True, p=dropout)
    fed = linear_tape(tape, hidden, f, d, positions=m, p=dropout)
    x = norm_tape(tape, tape.add(x, fed), m, d)
    return projection_tape(tape, x, m, shape.out, d)


def scaled_qkv_tape(tape: Tape, x: int, embeddings: int, dim: int) -> int:
    """Writes down queries, keys and values by weights that are scaled; their tensor."""
    scaled = tape.scaled(linear_shapes(dim, 3 * dim))
    return tape.operation(3 * embeddings * dim, [scaled, x], saves=[scaled, x])


class Encoder(nn.Module):
    """x_BMD -> x_BMD: self-attention, then feed-forward, each with dropout, a residual and a norm after it.

    The modules and their order are those of torch's TransformerEncoderLayer; on the CPU attention is
    written out, since torch's kernels for it are made for long sequences and large heads (docs/log.md).
    With a `layout` embeddings attend in blocks.
    """

    def __init__(
        self, dim: int, heads: int, feedforward: int, *, dropout: float, layout: BlockLayout | None = None
    ) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.blocks = None if layout is None else BlockAttention(layout)
        self.qkv = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim, dropout=dropout)
        self.feedforward = nn.Sequential(
            Linear(dim, feedforward, relu=True, dropout=dropout),
            Linear(feedforward, dim, dropout=dropout),
        )
        self.norms = nn.ModuleList((LayerNorm(dim), LayerNorm(dim)))
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Post-norm, as in "Attention Is All You Need" (arXiv 1706.03762, section 3)."""
        x_BMD = self.norms[0](x_BMD + self.output(self._attention(x_BMD)))
        y_BMD: Tensor = self.norms[1](x_BMD + self.feedforward(x_BMD))
        return y_BMD

    def _attention(self, x_BMD: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v for each head, heads one after another in the last dimension."""
        batch, m, dim = x_BMD.shape
        p = self.p if self.training else 0.0
        if self.blocks is not None:
            values_BMD: Tensor = self.blocks(self._scaled_qkv(x_BMD, p), p)
            return values_BMD
        if x_BMD.device.type != "cpu":
            qkv = self.qkv(x_BMD).view(batch, m, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            values = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], dropout_p=p)
        else:
            qkv = self._scaled_qkv(x_BMD, p).view(batch, m, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q_NMd, k_NMd, v_NMd = qkv.flatten(1, 2)
            weights_NMM = torch.bmm(q_NMd, k_NMd.mT).float().softmax(dim=-1).to(x_BMD.dtype)
            weights_NMM = drop(weights_NMM, p) if p else weights_NMM
            values = torch.bmm(weights_NMM, v_NMd).view(batch, self.heads, m, -1)
        return values.transpose(1, 2).reshape(batch, m, dim)

    def _scaled_qkv(self, x_BMD: Tensor, p: float) -> Tensor:
        """q / sqrt(d), k, and on CPUs v as dropout scales it: by the weights, which are fewer than the values."""
        weight, bias = self.qkv.weight, self.qkv.bias
        dim = weight.shape[1]
        scale = weight.new_ones(3)
        scale[0] = (dim // self.heads) ** -0.5
        if x_BMD.device.type == "cpu":
            scale[2] = dropout_scale(p)
        scale = scale.repeat_interleave(dim)
        return linear(x_BMD, weight * scale.unsqueeze(1), bias * scale)
