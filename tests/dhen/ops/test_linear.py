"""Linear, ReLU and dropout in one are what they are one after another, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dhen.ops.linear import Linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
relu_or_not = pytest.mark.parametrize("relu", [True, False])


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of a sum with unequal weights."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weights).sum(), inputs)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale)


@every_dtype
@relu_or_not
@pytest.mark.parametrize(("shape", "bias"), [((9, 12), True), ((4, 5, 12), True), ((4, 5, 12), False)])
def test_without_dropout(dtype: torch.dtype, shape: tuple[int, ...], relu: bool, bias: bool) -> None:
    torch.manual_seed(0)
    module = Linear(12, 7, bias=bias, relu=relu).to(dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y, reference = module(x), F.linear(x, module.weight, module.bias)
    reference = reference.relu() if relu else reference
    close(y, reference)
    inputs = (x, *module.parameters())
    for actual, expected in zip(gradients(y, *inputs), gradients(reference, *inputs), strict=True):
        close(actual, expected)


@every_dtype
@relu_or_not
def test_with_dropout(dtype: torch.dtype, relu: bool) -> None:
    """What is kept is scaled, and gradients are those of the mask that was drawn."""
    torch.manual_seed(0)
    module = Linear(12, 64, relu=relu, dropout=0.25).to(dtype)
    x = torch.randn(50, 12, dtype=dtype, requires_grad=True)
    y = module(x)
    kept = (y != 0).to(dtype)
    reference = F.linear(x, module.weight, module.bias) * kept / 0.75
    close(y, reference)
    assert (kept.float().mean().item() < 0.5) is relu
    inputs = (x, *module.parameters())
    for actual, expected in zip(gradients(y, *inputs), gradients(reference, *inputs), strict=True):
        close(actual, expected)


@every_dtype
def test_evaluation_drops_nothing(dtype: torch.dtype) -> None:
    module = Linear(12, 7, relu=True, dropout=0.9).to(dtype).eval()
    x = torch.randn(30, 12, dtype=dtype)
    close(module(x), F.linear(x, module.weight, module.bias).relu())
