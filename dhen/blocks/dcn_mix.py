"""DCN-V2's mixture of low-rank cross layers (arXiv 2008.13535, section 3.3, equations 3 and 4).

x_(i+1) = x_0 * sum_e G_e(x_i) (U_e g(C_e g(V_e^T x_i)) + b) + x_i, over the flattened embeddings, with g = tanh
and G a softmax, whose weights add up to one, so that b stands outside the sum. Gates are applied before U:
all experts' U are one matrix. One expert without g and C is `dhen/blocks/dcn_v2.py` with a rank.

Shapes: B examples, M embeddings, D their dimension, E experts, R rank of an expert.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import MATMUL, SOFTMAX_FLOPS, CostRow, Costs, elementwise_cost, linear_cost, within
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import EmbeddingProjection, crosses_tape, projection_cost, projection_tape
from dhen.tape import Tape


class DcnMixConfig(BlockConfig):
    """A few cross layers, each a mixture of low-rank ones, and the projection."""

    kind: Literal["dcn_mix"] = "dcn_mix"
    layers: int = Field(default=1, gt=0, le=32)
    """Number of cross layers; n of them reach interactions of order n + 1."""
    experts: int = Field(default=4, gt=0, le=256)
    """Number of low-rank maps in each cross layer, mixed by a softmax gate."""
    rank: int = Field(default=16, gt=0, le=4096)
    """Rank of each expert."""

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return nn.Sequential(
            CrossMixtures(shape.width, self),
            EmbeddingProjection(shape.embeddings, shape.out),
        )

    def cost(self, shape: BlockShape) -> Costs:
        """Four maps a cross layer, and the projection."""
        width, hidden = shape.width, self.experts * self.rank
        core = CostRow(
            name="core", kind=MATMUL, flops=2.0 * hidden * self.rank, parameters=hidden * self.rank
        )
        layer = (
            linear_cost("down", width, hidden, bias=False),
            linear_cost("gate", width, self.experts, bias=False),
            elementwise_cost("gate.softmax", self.experts, flops_each=SOFTMAX_FLOPS),
            core,
            elementwise_cost("hidden", hidden, flops_each=3),
            linear_cost("up", hidden, width),
            elementwise_cost("product", width, flops_each=2),
        )
        rows = [row for index in range(self.layers) for row in within(f"cross{index}", layer)]
        return (*rows, projection_cost("projection", shape.embeddings, shape.out, shape.dim))

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """The maps of each cross layer, the product with x_0, and the projection."""
        width, experts, rank = shape.width, self.experts, self.rank
        hidden = experts * rank

        def write_mixture(x: int, saved: int) -> int:
            down = linear_tape(tape, x, width, hidden, bias=False, saved=saved)
            bent = tape.operation(hidden, [down], saves_output=True)
            mapped = tape.operation(hidden, [bent], saves=[bent], parameters=[(experts, rank * rank)])
            tape.refer(bent)
            mapped = tape.operation(hidden, [mapped], saves_output=True)
            logits = linear_tape(tape, x, width, experts, bias=False, saved=saved)
            gates = tape.operation(experts, [logits], saves_output=True)
            gated = tape.operation(
                hidden, [mapped, gates], saves=[mapped, gates], backward_running=tape.held(hidden)
            )
            tape.refer(mapped, gates)
            return linear_tape(tape, tape.copy(gated), hidden, width)

        x = crosses_tape(tape, x, width, self.layers, write_mixture)
        return projection_tape(tape, x, shape.embeddings, shape.out, shape.dim)


class CrossMixtures(nn.Module):
    """x_BMD -> x_BMD after a few cross layers."""

    def __init__(self, width: int, config: DcnMixConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            CrossMixture(width, config.experts, config.rank) for _ in range(config.layers)
        )

    def forward(self, x_BMD: Tensor) -> Tensor:
        """On the flattened embeddings."""
        x0 = x = x_BMD.flatten(1)
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x.view_as(x_BMD)


class CrossMixture(nn.Module):
    """(B, width) -> (B, width): what a cross layer multiplies x_0 with."""

    def __init__(self, width: int, experts: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(width, experts * rank, bias=False)
        self.core_ERR = nn.Parameter(torch.empty(experts, rank, rank))
        self.gate = Linear(width, experts, bias=False)
        self.up = Linear(experts * rank, width)
        nn.init.xavier_uniform_(self.core_ERR.view(experts * rank, rank))

    def forward(self, x: Tensor) -> Tensor:
        """sum_e G_e(x) U_e g(C_e g(V_e^T x)) + b."""
        hidden_EBR = self.down(x).tanh().unflatten(1, self.core_ERR.shape[:2]).transpose(0, 1)
        hidden_EBR = torch.bmm(hidden_EBR, self.core_ERR).tanh()
        gated_EBR = hidden_EBR * self.gate(x).softmax(dim=1).mT.unsqueeze(2)
        mixed: Tensor = self.up(gated_EBR.transpose(0, 1).flatten(1))
        return mixed
