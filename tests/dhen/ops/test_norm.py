"""Norms are torch's, whatever the length and precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.ops.norm import LayerNorm, RmsNorm


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_norms_are_torchs(
    dtype: torch.dtype, tolerance: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for dim in (2, 8, 10, 16, 32, 48):
        assert_is(F.layer_norm, LayerNorm(dim), dim, dtype, tolerance)
    assert_is(F.rms_norm, RmsNorm(10), 10, dtype, tolerance)


def assert_is(
    torchs: Callable[..., Tensor], norm: nn.Module, dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    norm = norm.to(dtype)
    for name, parameter in norm.named_parameters():
        nn.init.uniform_(parameter, *((0.5, 2.0) if name == "weight" else (-1.0, 1.0)))
    x = (3 * torch.randn(6, 5, dim) + 1).to(dtype).requires_grad_()
    y = norm(x)
    exact = x.detach().float().requires_grad_()
    parameters = [p.detach().float().requires_grad_() for p in norm.parameters()]
    reference = torchs(exact, (dim,), *parameters, eps=1e-5)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), reference, rtol=tolerance, atol=3 * tolerance)
    upstream = torch.randn(6, 5, dim).to(dtype)
    y.backward(upstream)
    reference.backward(upstream.float())
    for actual, expected in zip((x, *norm.parameters()), (exact, *parameters), strict=True):
        scale = expected.grad.abs().max().item() + 1e-3
        torch.testing.assert_close(actual.grad.float(), expected.grad, rtol=tolerance, atol=tolerance * scale)
