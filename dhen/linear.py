"""Linear maps with ReLU and dropout in one, as fast as a CPU allows.

On a CPU in bf16 bias and ReLU are part of the matmul (oneDNN), where torch's own linear copies the bias into
its output first and leaves ReLU to another pass over memory. For the backward pass of ReLU and dropout
together only the output is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.dropout import drop, dropout_scale, keep_mask, where_kept, where_positive

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

    On the CPU dropout's scale is applied to weight and bias, which are fewer than the outputs; ReLU lets it
    through. Accelerators draw masks in parallel and keep PyTorch's operations.
    """
    if x.device.type != "cpu":
        y = F.linear(x, weight, bias)
        return F.dropout(y.relu() if relu else y, p)
    if p:
        weight, bias = weight * dropout_scale(p), bias if bias is None else bias * dropout_scale(p)
    if FUSED_ON_CPU and x.dtype is torch.bfloat16:
        y_NV: Tensor = _FusedLinear.apply(x.flatten(0, -2), weight, bias, relu, p)  # type: ignore[no-untyped-call]
        return y_NV.view(*x.shape[:-1], len(weight))
    y = F.linear(x, weight, bias)
    if relu:
        y = y.relu_()
    return drop(y, p) if p else y


class _FusedLinear(torch.autograd.Function):
    """x of (N, n_in), weight of (n_out, n_in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, p: float) -> Tensor:
        activation = "relu" if relu else "none"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
        keep = keep_mask(y, p) if p else None
        if keep is not None:
            y = where_kept(keep, y)
        ctx.relu = relu
        ctx.save_for_backward(x, weight, y if relu else keep)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, passed = ctx.saved_tensors
        if passed is not None:
            gradient = (where_positive if ctx.relu else where_kept)(passed, gradient)
        by_x, by_weight, by_bias, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if by_x else None,
            gradient.mT @ x if by_weight else None,
            gradient.sum(0) if by_bias else None,
            None,
            None,
        )
