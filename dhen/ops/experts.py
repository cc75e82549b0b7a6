"""A linear map for each of several experts, over rows sorted by expert: one operation, exact in its FLOPs.

As torch operations a loop over experts has shapes that depend on data, which traces under fake tensors refuse;
torch's own grouped matmul is not counted by its FLOP counter and wants rows of a multiple of 16 bytes. Here
the loop is inside one custom operator, of which the FLOP counter is told: 2 n_in n_out a row, whichever the
expert. On an accelerator the rows of each expert are read back once a call.

Shapes: E experts, N rows of all experts, I numbers into the map, O numbers out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from dhen.cost import SOFTMAX_FLOPS, Costs, elementwise_cost, linear_cost, within
from dhen.ops.linear import Linear, linear_tape
from dhen.ops.parts import mlp, mlp_cost, mlp_tape
from dhen.tape import Tape


@torch.library.custom_op("dhen::expert_linear", mutates_args=())
def expert_linear(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
    """W_e x + b_e: (N, n_out) of (N, n_in); rows up to `ends_E[0]` are the first expert's, and so on."""
    y_NO = x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])
    for expert, rows in _pieces(ends_E):
        torch.addmm(bias_EO[expert], x_NI[rows], weight_EOI[expert].mT, out=y_NO[rows])
    return y_NO


@torch.library.custom_op("dhen::expert_linear_backward", mutates_args=())
def expert_linear_backward(
    gradient_NO: Tensor, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; zero for experts without rows."""
    by_x, by_weight = torch.empty_like(x_NI), torch.zeros_like(weight_EOI)
    by_bias = weight_EOI.new_zeros(weight_EOI.shape[:2])
    for expert, rows in _pieces(ends_E):
        torch.mm(gradient_NO[rows], weight_EOI[expert], out=by_x[rows])
        torch.mm(gradient_NO[rows].mT, x_NI[rows], out=by_weight[expert])
        torch.sum(gradient_NO[rows], dim=0, out=by_bias[expert])
    return by_x, by_weight, by_bias


def _pieces(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and which."""
    for expert, (start, end) in enumerate(pairwise((0, *ends_E.tolist()))):
        if start < end:
            yield expert, slice(start, end)


@expert_linear.register_fake
def _(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_EOI.shape[1])


@expert_linear_backward.register_fake
def _(gradient_NO: Tensor, x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias_EO = weight_EOI.new_empty(weight_EOI.shape[:2])
    return torch.empty_like(x_NI), torch.empty_like(weight_EOI), bias_EO


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x_NI, weight_EOI, _, ends_E = inputs
    ctx.save_for_backward(x_NI, weight_EOI, ends_E)


def _backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, ...]:
    return (*expert_linear_backward(gradient_NO.contiguous(), *ctx.saved_tensors), None)


expert_linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.dhen.expert_linear)
def _(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(x_shape[0]) * int(weight_shape[1]) * int(weight_shape[2])


@register_flop_formula(torch.ops.dhen.expert_linear_backward)
def _(gradient_shape: Any, x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 4 * int(x_shape[0]) * int(weight_shape[1]) * int(weight_shape[2])


# A mixture-of-experts MLP: softmax-gated sum of expert MLPs, all of them computed.
#
# The DHEN paper (section 4.3, table 3) scales AdvancedDLRM with MoE as the rival way to spend FLOPs.
# Dense gating as in MMoE (Ma et al., KDD 2018) with one gate, so FLOPs grow with the experts.


class MoeMlp(nn.Module):
    """(B, n_in) -> (B, widths[-1])."""

    def __init__(self, n_in: int, widths: Sequence[int], experts: int, *, dropout: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(n_in, widths, dropout=dropout) for _ in range(experts))
        self.gate = Linear(n_in, experts)

    def forward(self, x: Tensor) -> Tensor:
        """sum_e softmax(gate(x))_e expert_e(x)."""
        weights_BE = self.gate(x).softmax(dim=1)
        total = weights_BE[:, :1] * self.experts[0](x)
        for index, expert in enumerate(self.experts[1:], start=1):
            total = total + weights_BE[:, index : index + 1] * expert(x)
        return total  # type: ignore[no-any-return]


def moe_cost(n_in: int, widths: Sequence[int], experts: int) -> Costs:
    """The cost of `MoeMlp`."""
    each = [row for e in range(experts) for row in within(f"expert{e}", mlp_cost("mlp", n_in, widths))]
    return (
        linear_cost("gate", n_in, experts),
        elementwise_cost("gate.softmax", experts, flops_each=SOFTMAX_FLOPS),
        *each,
        elementwise_cost("mixture", widths[-1], flops_each=2 * experts - 1),
    )


def moe_tape(tape: Tape, x: int, n_in: int, widths: Sequence[int], experts: int, *, dropout: float) -> int:
    """The memory of `MoeMlp`."""
    width, total = widths[-1], None
    gate = tape.operation(experts, [linear_tape(tape, x, n_in, experts)], saves_output=True)
    for _ in range(experts):
        expert = mlp_tape(tape, x, n_in, widths, dropout=dropout)
        weighted = tape.operation(
            width, [gate, expert], saves=[gate, expert], backward_running=tape.held(width)
        )
        total = weighted if total is None else tape.add(total, weighted)
    assert total is not None
    return total
