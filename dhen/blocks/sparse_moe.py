"""A sparsely gated mixture of experts (Shazeer et al., arXiv 1701.06538, section 2, equations 1 to 5).

u = sum over the k experts with the highest gates of G_e(x) E_e(x), over the flattened embeddings; an expert is a
feed-forward network of one hidden layer, and G a softmax over the k. In training the gates are noisy, H(x) = x W_g
+ N(0, 1) softplus(x W_noise), and begin at zero, so that all experts get examples at first (appendix A). Only the
k experts that an example is sent to are computed, and only they are counted as FLOPs, with the gate and the
noise, which training has; parameters and memory are those of all. Left out: the losses that balance the experts'
load, since a module has no loss of its own.

Shapes: B examples, M embeddings, D their dimension, V = M D numbers of all embeddings; E experts, K experts
chosen for an example, N = B K rows that experts see, sorted by expert, I numbers into an expert's map and O out
of it.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.blocks.base import BlockConfig, BlockShape
from dhen.cost import MATMUL, SOFTMAX_FLOPS, CostRow, Costs, elementwise_cost, linear_cost, product_cost
from dhen.ops.experts import expert_linear
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.pairwise import INDEX_BYTES
from dhen.tape import Tape


class SparseMoeConfig(BlockConfig):
    """A gate and experts, a few of which see an example."""

    kind: Literal["sparse_moe"] = "sparse_moe"
    experts: int = Field(default=4, gt=1, le=4096)
    """Number of experts, each a feed-forward network."""
    active: int = Field(default=2, gt=0)
    """k, the number of experts that each example is sent to; no more than there are."""
    hidden: int = Field(default=64, gt=0, le=65_536)
    """Width of each expert's hidden layer."""

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> Self:
        if self.active > self.experts:
            raise ValueError(
                f"active={self.active} of experts={self.experts}; active of 1 to {self.experts} would work"
            )
        return self

    def build(self, shape: BlockShape, *, dropout: float) -> nn.Module:
        """x_BMD -> u_BLD."""
        return SparseMoe(shape, self)

    def cost(self, shape: BlockShape) -> Costs:
        """Gate and noise, the experts that an example is sent to, their mixture."""
        width, out = shape.width, shape.out_width
        return (
            linear_cost("gate", width, self.experts, bias=False),
            linear_cost("noise", width, self.experts, bias=False),
            elementwise_cost("gate.noisy", self.experts, flops_each=6),
            elementwise_cost("gate.softmax", self.active, flops_each=SOFTMAX_FLOPS),
            self._experts_cost("experts0", width, self.hidden),
            elementwise_cost("experts0.relu", self.active * self.hidden),
            self._experts_cost("experts1", self.hidden, out),
            product_cost("mixture", 1, self.active, out),
        )

    def write(self, tape: Tape, x: int, shape: BlockShape, *, dropout: float) -> int:
        """Gate and noise, rows sorted by expert, the experts, their outputs in order again, their mixture."""
        width, out, k = shape.width, shape.out_width, self.active
        logits = linear_tape(tape, x, width, self.experts, bias=False)
        scales = linear_tape(tape, x, width, self.experts, bias=False)
        scales = tape.operation(self.experts, [scales], saves=[scales])
        draws = tape.scratch(self.experts)
        logits = tape.operation(self.experts, [logits, scales], saves=[draws])
        chosen = tape.scratch(k, itemsize=INDEX_BYTES)
        top = tape.operation(k, [logits], saves=[chosen])
        order, back = (tape.scratch(k, itemsize=INDEX_BYTES) for _ in range(2))
        rows = tape.operation(k, [], itemsize=INDEX_BYTES)
        gathered = tape.operation(k * width, [x], saves=[back], backward_running=tape.held(k * width))
        hidden = self._write_experts(tape, gathered, width, self.hidden)
        hidden = tape.operation(k * self.hidden, [hidden], saves_output=True)
        outputs = self._write_experts(tape, hidden, self.hidden, out)
        tape.refer(rows)
        ordered = tape.operation(k * out, [outputs], saves=[order])
        weights = tape.operation(k, [top], saves_output=True)
        return tape.operation(out, [weights, ordered], saves=[weights, ordered])

    def _write_experts(self, tape: Tape, x: int, n_in: int, n_out: int) -> int:
        weights = [(self.experts, n_out * n_in), (self.experts, n_out)]
        return tape.operation(self.active * n_out, [x], saves=[x], parameters=weights)

    def _experts_cost(self, name: str, n_in: int, n_out: int) -> CostRow:
        parameters = self.experts * (n_in + 1) * n_out
        return CostRow(name=name, kind=MATMUL, flops=2.0 * self.active * n_in * n_out, parameters=parameters)


class SparseMoe(nn.Module):
    """x_BMD -> u_BLD."""

    def __init__(self, shape: BlockShape, config: SparseMoeConfig) -> None:
        super().__init__()
        width, self.shape, self.active = shape.width, (shape.out, shape.dim), config.active
        self.gate = Linear(width, config.experts, bias=False)
        self.noise = Linear(width, config.experts, bias=False)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.noise.weight)
        self.first = ExpertLinear(config.experts, width, config.hidden)
        self.second = ExpertLinear(config.experts, config.hidden, shape.out_width)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """Rows for each choice of an example, sorted by expert, and back."""
        x_BV = x_BMD.flatten(1)
        top_BK, chosen_BK = self._logits(x_BV).topk(self.active, dim=1)
        sorted_N, order_N = chosen_BK.flatten().sort(stable=True)
        experts_E = torch.arange(len(self.first.weight), device=x_BV.device)
        ends_E = torch.searchsorted(sorted_N, experts_E, right=True)
        back_N = order_N.argsort()
        hidden = self.first(_taken(x_BV, order_N // self.active, back_N), ends_E).relu()
        outputs_NV = _taken(self.second(hidden, ends_E), back_N, order_N)
        mixed = torch.bmm(top_BK.softmax(dim=1).unsqueeze(1), outputs_NV.view(*top_BK.shape, -1))
        return mixed.view(-1, *self.shape)

    def _logits(self, x_BV: Tensor) -> Tensor:
        logits_BE: Tensor = self.gate(x_BV)
        if self.training:
            return torch.addcmul(logits_BE, torch.randn_like(logits_BE), F.softplus(self.noise(x_BV)))
        return logits_BE


def _taken(x_BV: Tensor, rows_N: Tensor, back_N: Tensor) -> Tensor:
    """The rows of x, each as often as the others; `back_N` has the places of the first row's copies, and so
    on."""
    y_NV: Tensor = _Taken.apply(x_BV, rows_N, back_N)  # type: ignore[no-untyped-call]
    return y_NV


class _Taken(torch.autograd.Function):
    """Gathers in backward too, where torch would scatter: its kernel for that is serial on CPUs."""

    @staticmethod
    def forward(ctx: Any, x_BV: Tensor, rows_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.copies = rows_N.shape[0] // x_BV.shape[0]
        return x_BV.index_select(0, rows_N)

    @staticmethod
    def backward(ctx: Any, gradient_NV: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        gathered = gradient_NV.index_select(0, back_N)
        if ctx.copies > 1:
            gathered = gathered.view(-1, ctx.copies, gathered.shape[1]).sum(1)
        return gathered, None, None


class ExpertLinear(nn.Module):
    """A linear map for each expert, over rows sorted by expert."""

    def __init__(self, experts: int, n_in: int, n_out: int) -> None:
        super().__init__()
        bound = n_in**-0.5  # as torch's linear maps begin
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(experts, n_out).uniform_(-bound, bound))

    def forward(self, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        """(N, n_out)."""
        y_NO: Tensor = expert_linear(x_NI, self.weight, self.bias, ends_E)
        return y_NO
