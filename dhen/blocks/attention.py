"""Self-attention: u = W TransformerEncoderLayer(x), W in R^(m x l) (DHEN paper, section 3.2.2).

The encoder layer (post-norm, ReLU) has the embeddings for tokens; no positions are added, since each
embedding's place already says which feature it is.

Shapes: B examples, M embeddings (the tokens), D their dimension; N examples and heads, one row per head of each
example.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

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
from dhen.ops.block_attention import BlockAttention, fused_attention_tape, fused_values
from dhen.ops.block_layout import BlockLayout
from dhen.ops.linear import Linear, linear, linear_tape, part_shapes
from dhen.ops.norm import LayerNorm, drop, dropout_scale, norm_tape
from dhen.ops.parts import EmbeddingProjection, projection_cost, projection_tape, split_in_turn
from dhen.ops.split import How, RankGroup, apart, how_split
from dhen.tape import FP32_BYTES, MASK_BYTES, Tape


class EncoderConfig(DropoutBlockConfig):
    """A Transformer encoder layer and its projection, whichever embeddings attend to which."""

    heads: int = Field(default=2, gt=0)
    """Number of attention heads; must divide the embedding dimension."""
    feedforward: int = Field(default=64, gt=0, le=65_536)
    """Width of the encoder layer's feed-forward part."""

    def check(self, dim: int) -> None:
        """Heads divide the embedding dimension."""
        if dim % self.heads:
            fitting = [n for n in range(1, dim + 1) if dim % n == 0]
            raise ValueError(
                f"{self.kind} with heads={self.heads} does not divide embedding_dim={dim}; "
                f"heads that do: {fitting}"
            )

    def layout_over(self, embeddings: int) -> BlockLayout | None:
        """Returns which blocks of so many embeddings attend to which; None if all attend to all."""
        del embeddings
        return None

    @abstractmethod
    def products(self, shape: BlockShape) -> Costs:
        """The cost of attention itself: its products and its softmax."""

    @abstractmethod
    def attend(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Writes down attention, without its output's map."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        layout = self.layout_over(shape.embeddings)
        return nn.Sequential(
            Encoder(shape.dim, self.heads, self.feedforward, dropout=dropout, layout=layout),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Projections, the two products of attention, softmax, feed-forward, norms."""
        m, d, f = shape.embeddings, shape.dim, self.feedforward
        return (
            linear_cost("qkv", d, 3 * d, positions=m),
            *self.products(shape),
            linear_cost("output", d, d, positions=m),
            linear_cost("feedforward0", d, f, positions=m),
            elementwise_cost("feedforward0.relu", m * f),
            linear_cost("feedforward1", f, d, positions=m),
            elementwise_cost("norms", 2 * m * d, flops_each=NORM_FLOPS + 1, parameters=4 * d),
            projection_cost("projection", m, shape.out, d),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Attention, feed-forward, each with its residual and norm; the projection."""
        m, d, f = shape.embeddings, shape.dim, self.feedforward
        attended = self.attend(tape, x, shape, dropout=dropout)
        rows: How | None = "rows" if heads_split(self.heads, tape.ranks) else None
        attended = linear_tape(tape, attended, d, d, positions=m, p=dropout, how=rows)
        x = norm_tape(tape, tape.add(x, attended), m, d)
        first, second = how_split([(d, f), (f, d)], tape.ranks)
        hidden = linear_tape(tape, x, d, f, positions=m, relu=True, p=dropout, how=first)
        fed = linear_tape(tape, hidden, f, d, positions=m, p=dropout, how=second)
        x = norm_tape(tape, tape.add(x, fed), m, d)
        return projection_tape(tape, x, m, shape.out, d)

    def scaled_qkv(self, tape: Tape, x: int, shape: BlockShape) -> int:
        """Writes down queries, keys and values by weights that are scaled; their tensor."""
        m, d = shape.embeddings, shape.dim
        how = heads_split(self.heads, tape.ranks)
        scaled = tape.scaled(part_shapes(tape, d, 3 * d, how))
        if how is not None:
            tape.compute_elsewhere(6.0 * m * d * d)
            tape.send("all_reduce", m * d, forward=False)
        return tape.operation(3 * m * self.part_of(d, tape.ranks), [scaled, x], saves=[scaled, x])

    def part_of(self, number: int, ranks: int) -> int:
        """Returns a rank's part of the heads, or of a number that they divide."""
        return number // ranks if heads_split(self.heads, ranks) else number

    def split(self, module: nn.Module, group: RankGroup) -> None:
        """Each rank has some heads, with their layout, and some of the feed-forward part's width."""
        assert isinstance(module, nn.Sequential)
        encoder = module[0]
        assert isinstance(encoder, Encoder)
        encoder.split(group)

    def whole(self, shape: BlockShape, ranks: int) -> str | None:
        """Heads and widths that the ranks do not divide."""
        reasons = []
        if heads_split(self.heads, ranks) is None:
            fitting = [n for n in range(ranks, shape.dim + 1, ranks) if shape.dim % n == 0]
            would = f"; of {', '.join(map(str, fitting))} it would be" if fitting else ""
            reasons.append(f"{ranks} does not divide heads={self.heads}{would}")
        if self.feedforward % ranks:
            reasons.append(f"{ranks} does not divide feedforward={self.feedforward}")
        return ", and ".join(reasons) or None


class AttentionConfig(EncoderConfig):
    """A Transformer encoder layer and its projection."""

    kind: Literal["attention"] = "attention"

    def products(self, shape: BlockShape) -> Costs:
        """Two products over all pairs, and softmax."""
        m, d = shape.embeddings, shape.dim
        return (
            product_cost("scores", m, d, m, kind=ATTENTION),
            elementwise_cost("softmax", self.heads * m * m, flops_each=SOFTMAX_FLOPS),
            product_cost("values", m, m, d, kind=ATTENTION),
        )

    def attend(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """softmax(q k^T / sqrt(d)) v. With one head its rearrangements are views."""
        m, how = shape.embeddings, heads_split(self.heads, tape.ranks)
        heads, d = self.part_of(self.heads, tape.ranks), self.part_of(shape.dim, tape.ranks)
        if how is not None:
            tape.compute_elsewhere(4.0 * m * m * shape.dim)
        if tape.device == "cuda":  # fused: q, k, v, its output and one number per row of scores
            qkv = linear_tape(tape, x, shape.dim, 3 * shape.dim, positions=m, how=how)
            return fused_attention_tape(tape, qkv, m, d, heads)
        qkv = self.scaled_qkv(tape, x, shape)
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


def heads_split(heads: int, ranks: int) -> How | None:
    """Returns how queries, keys and values are split over so many ranks; None if these do not divide the
    heads."""
    return "columns" if ranks > 1 and heads % ranks == 0 else None


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
        self.group: RankGroup | None = None

    def split(self, group: RankGroup) -> None:
        """Keeps this rank's part of the heads and of the feed-forward part's width."""
        if heads_split(self.heads, group.size):
            self.group = group
            self.qkv.split("columns", group, blocks=3)
            self.output.split("rows", group)
            self.heads //= group.size
            if self.blocks is not None:
                self.blocks = BlockAttention(self.blocks.layout.part(group.rank, group.size))
        split_in_turn([*self.feedforward], group)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Post-norm, as in "Attention Is All You Need" (arXiv 1706.03762, section 3)."""
        x_BMD = self.norms[0](x_BMD + self.output(self._attention(x_BMD)))
        y_BMD: Tensor = self.norms[1](x_BMD + self.feedforward(x_BMD))
        return y_BMD

    def _attention(self, x_BMD: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(d)) v for each head, heads one after another in the last dimension."""
        batch, m, _ = x_BMD.shape
        p = self.p if self.training else 0.0
        if self.blocks is not None:
            qkv = self._scaled_qkv(x_BMD, p)
            with self._drawn_apart(x_BMD, p):
                values_BMD: Tensor = self.blocks(qkv, p)
            return values_BMD
        if x_BMD.device.type != "cpu":
            qkv = self.qkv(x_BMD).view(batch, m, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            with self._drawn_apart(x_BMD, p):
                values = fused_values(qkv[0], qkv[1], qkv[2], p)
        else:
            qkv = self._scaled_qkv(x_BMD, p).view(batch, m, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q_NMd, k_NMd, v_NMd = qkv.flatten(1, 2)
            weights_NMM = torch.bmm(q_NMd, k_NMd.mT).float().softmax(dim=-1).to(x_BMD.dtype)
            with self._drawn_apart(x_BMD, p):
                weights_NMM = drop(weights_NMM, p) if p else weights_NMM
            values = torch.bmm(weights_NMM, v_NMd).view(batch, self.heads, m, -1)
        return values.transpose(1, 2).reshape(batch, m, -1)

    def _drawn_apart(self, x: Tensor, p: float) -> AbstractContextManager[None]:
        """Dropout of a rank's own heads is not that of the other ranks' heads."""
        return apart(self.group, x.device) if self.group is not None and p else nullcontext()

    def _scaled_qkv(self, x_BMD: Tensor, p: float) -> Tensor:
        """q / sqrt(d), k, and on CPUs v as dropout scales it: by the weights, which are fewer than the values."""
        weight, bias = self.qkv.weight, self.qkv.bias
        dim = weight.shape[0] // 3  # of this rank's heads
        scale = weight.new_ones(3)
        # an accelerator would wait for a number that is assigned
        scale[:1].fill_((dim // self.heads) ** -0.5)
        if x_BMD.device.type == "cpu":
            scale[2:].fill_(dropout_scale(p))
        scale = scale.repeat_interleave(dim)
        return linear(x_BMD, weight * scale.unsqueeze(1), bias * scale, over=self.qkv.over)
