"""Norms are torch's, whatever the length and precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dhen.ops.norm import LayerNorm, RmsNorm


@pytest.mark.parametrize("dim", [2, 8, 10, 16, 32, 48])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_is_torchs(
    dim: int, dtype: torch.dtype, tolerance: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    norm = LayerNorm(dim).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.uniform_(-1.0, 1.0)
    x = (3 * torch.randn(6, 5, dim) + 1).to(dtype).requires_grad_()
    y = norm(x)
    exact = x.detach().float().requires_grad_()
    weight, bias = (p.detach().float().requires_grad_() for p in (norm.weight, norm.bias))
    reference = F.layer_norm(exact, (dim,), weight, bias)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), reference, rtol=tolerance, atol=3 * tolerance)
    upstream = torch.randn(6, 5, dim).to(dtype)
    y.backward(upstream)
    reference.backward(upstream.float())
    pairs = ((x, exact), (norm.weight, weight), (norm.bias, bias))
    for actual, expected in pairs:
        assert actual.grad is not None
        assert expected.grad is not None
        scale = expected.grad.abs().max().item() + 1e-3
        torch.testing.assert_close(actual.grad.float(), expected.grad, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_rms_norm_is_torchs(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = RmsNorm(10).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    x = (3 * torch.randn(6, 5, 10) + 1).to(dtype).requires_grad_()
    exact, weight = x.detach().float().requires_grad_(), norm.weight.detach().float().requires_grad_()
    y, reference = norm(x), F.rms_norm(exact, (10,), weight, 1e-5)
    assert y.dtype is dtype
    torch.testing.assert_close(y.float(), reference, rtol=tolerance, atol=tolerance)
    upstream = torch.randn(6, 5, 10).to(dtype)
    y.backward(upstream)
    reference.backward(upstream.float())
    for actual, expected in ((x, exact), (norm.weight, weight)):
        assert actual.grad is not None
        assert expected.grad is not None
        scale = expected.grad.abs().max().item()
        torch.testing.assert_close(actual.grad.float(), expected.grad, rtol=tolerance, atol=tolerance * scale)
