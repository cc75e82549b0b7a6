"""Linear maps with ReLU and dropout in one: one tensor kept for backward where PyTorch's operations keep three.

For the backward pass of ReLU and dropout together the output is enough. On a CPU in bf16 bias and ReLU are
part of the matmul too (oneDNN), where torch's own linear copies the bias into its output first and leaves
ReLU to another pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.memory.tape import MASK_BYTES, NOTHING, Shape, Tape
from dhen.ops.dropout import dropout_scale, keep_mask, where_kept, where_positive
from dhen.ops.split_backward import wanted

FUSED_ON_CPU = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]
"""Whether this PyTorch was built with oneDNN."""


class Linear(nn.Linear):
    """dropout(act(W x + b)): (..., n_in) -> (..., n_out); act is ReLU or nothing."""

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool = True, relu: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(n_in, n_out, bias)
        self.relu, self.p = relu, dropout

    def forward(self, input: Tensor) -> Tensor:
        """Without dropout in evaluation."""
        return linear(input, self.weight, self.bias, relu=self.relu, p=self.p if self.training else 0.0)

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"{super().extra_repr()}, relu={self.relu}, dropout={self.p}"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False, p: float = 0.0) -> Tensor:
    """dropout(act(W x + b)) with dropout probability p: (..., n_in) -> (..., n_out).

    Or K maps in one batched product, weight of (K, n_out, n_in): (K, N, n_in) -> (K, N, n_out).

    On the CPU dropout's scale is applied to weight and bias, which are fewer than the outputs; ReLU lets it
    through.
    """
    if p and x.device.type == "cpu":
        weight, bias = weight * dropout_scale(p), bias if bias is None else bias * dropout_scale(p)
    if weight.dim() == 3:
        return _Linear.apply(x, weight, bias, relu, p)  # type: ignore[no-untyped-call, no-any-return]
    y_NV: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias, relu, p)  # type: ignore[no-untyped-call]
    return y_NV.view(*x.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """x of (N, n_in), weight of (n_out, n_in); or K of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, p: float) -> Tensor:
        y, keep = _drop(_product(x, weight, bias, relu), p)
        ctx.relu, ctx.scale = relu, 1.0 if x.device.type == "cpu" else 1.0 / (1.0 - p)
        ctx.save_for_backward(x, weight, y if relu else keep)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, passed = ctx.saved_tensors
        if passed is not None:
            gradient = _passed_on(passed, gradient, ctx.relu, ctx.scale)
        by_x, by_weight, by_bias, *_ = wanted(ctx)
        return (
            gradient @ weight if by_x else None,
            gradient.mT @ x if by_weight else None,
            gradient.sum(-2) if by_bias else None,
            None,
            None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    if weight.dim() == 3:
        assert bias is not None
        y = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        return y.relu_() if relu else y
    if FUSED_ON_CPU and x.device.type == "cpu" and x.dtype is torch.bfloat16:
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight, bias, "relu" if relu else "none", [], ""
        )
        return fused
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


def _drop(y: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """What dropout leaves, and its mask; accelerators draw masks in parallel and have PyTorch's kernel."""
    if not p:
        return y, None
    if y.device.type != "cpu":
        return torch.native_dropout(y, p, True)
    keep = keep_mask(y, p)
    return where_kept(keep, y), keep


def _passed_on(passed: Tensor, gradient: Tensor, relu: bool, scale: float) -> Tensor:
    """The gradient before dropout and ReLU; `passed` is the output (with ReLU) or dropout's mask."""
    if gradient.device.type == "cpu":
        return (where_positive if relu else where_kept)(passed, gradient)
    return torch.where(passed > 0 if relu else passed, gradient * scale, 0.0)


def linear_tape(
    tape: Tape,
    x: int,
    n_in: int,
    n_out: int,
    *,
    positions: int = 1,
    bias: bool = True,
    relu: bool = False,
    p: float = 0.0,
    x_needs_gradient: bool = True,
    saved: int | None = None,
    maps: int = 1,
) -> int:
    """The memory of `linear`, applied at `positions` places; `saved` is what x is a view of, if it is one.

    Of `maps` in one batched product each has rows of its own among the tape's.
    """
    values, weights = n_out * positions, linear_shapes(n_in, n_out, bias=bias)
    if maps > 1:
        weights = [(maps, rows * width) for rows, width in weights]
    scaled = [tape.scaled(weights)] if p and tape.device == "cpu" else []
    mask = [] if relu or not p else [tape.scratch(values, itemsize=MASK_BYTES)]
    return tape.operation(
        values,
        [*scaled, *([x] if x_needs_gradient else [])],
        saves=[x if saved is None else saved, *scaled, *mask],
        saves_output=relu,
        running=tape.held(values, itemsize=tape.itemsize + MASK_BYTES * relu) if p else NOTHING,
        backward_running=tape.held(values if relu or p else 0),
        parameters=() if scaled else weights,
    )


def linear_shapes(n_in: int, n_out: int, *, bias: bool = True) -> list[Shape]:
    """Of a linear map's parameters."""
    return [(n_out, n_in), (n_out, 1)] if bias else [(n_out, n_in)]
