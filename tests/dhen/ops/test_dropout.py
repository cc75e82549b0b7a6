"""Dropout: how much is zeroed, that the mean stays, and that gradients pass where values passed."""

from __future__ import annotations

import pytest
import torch

from dhen.ops.norm import LEVELS, drop, dropout_scale, random_bytes


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeroes_a_fraction_and_gradients_pass_where_values_passed(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(1001, 999, dtype=dtype, requires_grad=True)
    y = drop(x, p)
    rounded = round(p * LEVELS) / LEVELS
    assert (y == 0).float().mean().item() == pytest.approx(rounded, abs=0.002)
    assert y.unique().tolist() == [0.0, 1.0]
    assert y.float().mean().item() * dropout_scale(p) == pytest.approx(1.0, rel=0.02)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, y)


def test_extremes() -> None:
    x = torch.ones(1000, 1000)
    assert torch.equal(drop(x, 0.0), x)
    assert drop(x, 1.0).mean().item() == pytest.approx(1 / LEVELS, rel=0.1)


def test_rows_columns_and_draws_differ() -> None:
    torch.manual_seed(0)
    first, second = (drop(torch.ones(512, 512), 0.5) for _ in range(2))
    for other in (second, first.T, first.roll(1, 0), first.roll(1, 1), first.roll(8, 1)):
        agree = (first == other).float().mean().item()
        assert agree == pytest.approx(0.5, abs=0.01)


def test_seeded_by_torch() -> None:
    x = torch.randn(100, 7)
    torch.manual_seed(5)
    first = drop(x, 0.3)
    torch.manual_seed(5)
    assert torch.equal(first, drop(x, 0.3))


def test_bytes_are_uniform_and_masks_of_any_size_differ() -> None:
    torch.manual_seed(0)
    for count in (7, 1000, 3_000_001):
        first, second = random_bytes(count), random_bytes(count)
        assert len(first) == count
        assert (first != second).any()
    counts = torch.bincount(first.int() + 128, minlength=256).float()
    chi_square = ((counts - count / 256) ** 2 / (count / 256)).sum().item()
    assert 150 < chi_square < 370  # 255 degrees of freedom


def test_many_masks_drop_each_element_equally_often() -> None:
    torch.manual_seed(0)
    dropped = sum((drop(torch.ones(5000), 0.25) == 0).float() for _ in range(2000)) / 2000
    assert dropped.mean().item() == pytest.approx(0.25, abs=0.002)
    assert dropped.std().item() == pytest.approx((0.25 * 0.75 / 2000) ** 0.5, rel=0.1)
