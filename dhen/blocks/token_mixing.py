"""RankMixer's block: token mixing without parameters, then a feed-forward of each token (arXiv 2507.15551).

The embeddings become T tokens (a linear map over them, as the paper makes tokens of features), each cut into
T heads; the new token h has the h-th heads of all. s = LN(mixed + tokens), and each token has weights of its
own: LN(GELU(s W_1 + b_1) W_2 + b_2 + s). A projection makes l embeddings of the T. Left out: the paper's sparse
experts (`dhen/blocks/sparse_moe.py` routes examples).

Shapes: B examples, T tokens, D their dimension, I numbers of a token before its map.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import MATMUL, NORM_FLOPS, CostRow, Costs, elementwise_cost
from dhen.ops.norm import LayerNorm, norm_tape
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape
from dhen.tape import Tape

GELU_FLOPS = 8
"""Elementwise operations a value, about."""


class TokenMixingConfig(BlockConfig):
    """Tokens, their mixing, a feed-forward each, and the projection."""

    kind: Literal["token_mixing"] = "token_mixing"
    tokens: int = Field(default=4, gt=0)
    """T, the number of tokens, and of heads of each; must divide the embedding dimension."""
    feedforward: int = Field(default=64, gt=0, le=65_536)
    """Width of each token's feed-forward network."""

    def check(self, dim: int) -> None:
        """Tokens divide the embedding dimension."""
        if dim % self.tokens:
            fitting = [n for n in range(1, dim + 1) if dim % n == 0]
            raise ValueError(
                f"token_mixing with tokens={self.tokens} does not divide embedding_dim={dim}; "
                f"tokens that do: {fitting}"
            )

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            EmbeddingProjection(shape.embeddings, self.tokens),
            TokenMixing(self.tokens, shape.dim, self.feedforward),
            EmbeddingProjection(self.tokens, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Tokens, the feed-forward of each, norms, the projection."""
        t, d, f = self.tokens, shape.dim, self.feedforward
        return (
            projection_cost("tokens", shape.embeddings, t, d),
            CostRow(name="feedforward0", kind=MATMUL, flops=2.0 * t * d * f, parameters=t * (d + 1) * f),
            elementwise_cost("feedforward0.gelu", t * f, flops_each=GELU_FLOPS),
            CostRow(name="feedforward1", kind=MATMUL, flops=2.0 * t * f * d, parameters=t * (f + 1) * d),
            elementwise_cost("norms", 2 * t * d, flops_each=NORM_FLOPS + 1, parameters=4 * d),
            projection_cost("projection", t, shape.out, d),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Tokens, their mixing, feed-forward, norms, the projection."""
        t, d, f = self.tokens, shape.dim, self.feedforward
        tokens = projection_tape(tape, x, shape.embeddings, t, d)
        mixed = norm_tape(tape, tape.add(tokens, tape.view(tokens)), t, d)
        hidden = tape.operation(t * f, [mixed], saves=[mixed], parameters=[(t, d * f), (t, f)])
        bent = tape.operation(t * f, [hidden], saves=[hidden])
        tape.refer(hidden)
        fed = tape.operation(t * d, [bent], saves=[bent], parameters=[(t, f * d), (t, d)])
        y = norm_tape(tape, tape.add(mixed, tape.view(fed)), t, d)
        return projection_tape(tape, y, t, shape.out, d)


class TokenMixing(nn.Module):
    """x_BTD -> x_BTD."""

    def __init__(self, tokens: int, dim: int, feedforward: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.first = TokenLinear(tokens, dim, feedforward)
        self.second = TokenLinear(tokens, feedforward, dim)
        self.norms = nn.ModuleList((LayerNorm(dim), LayerNorm(dim)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """RankMixer, equation 1."""
        heads_BTTd = x_BTD.view(*x_BTD.shape[:2], self.tokens, -1)
        mixed_BTD = heads_BTTd.transpose(1, 2).reshape(x_BTD.shape)
        s_BTD = self.norms[0](mixed_BTD + x_BTD)
        fed_TBD = self.second(F.gelu(self.first(s_BTD.transpose(0, 1))))
        y_BTD: Tensor = self.norms[1](s_BTD + fed_TBD.transpose(0, 1))
        return y_BTD


class TokenLinear(nn.Module):
    """A linear map for each token: (T, B, n_in) -> (T, B, n_out)."""

    def __init__(self, tokens: int, n_in: int, n_out: int) -> None:
        super().__init__()
        bound = n_in**-0.5  # as torch's linear maps begin
        self.weight = nn.Parameter(torch.empty(tokens, n_in, n_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(tokens, 1, n_out).uniform_(-bound, bound))

    def forward(self, x_TBI: Tensor) -> Tensor:
        """One batched product."""
        return torch.baddbmm(self.bias, x_TBI, self.weight)
