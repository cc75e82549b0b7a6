"""bf16 moments: they follow fp32's where rounding to the nearest would freeze them, and take half the memory."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from trials.optim.adamw import CHUNKS, WORKSPACE_BYTES, Bf16AdamW, moments, random_bits, ring_bytes
from trials.planner.memory_counter import MemoryCounter

CPU = torch.device("cpu")


def noisy_steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int) -> Tensor:
    """Towards 1, by gradients with noise that is the same for every optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        weight.grad = (weight.detach() - 1) + torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weight.detach()


def a_weight(size: int = 3000) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)))


def test_a_slow_moment_follows_where_the_nearest_number_stays() -> None:
    """From 1 towards 1/4, a thousandth of the way a step; bf16's numbers next to 1 are 1/256 and 1/128 away."""
    weight, steps = nn.Parameter(torch.zeros(4096)), 400
    optimizer = Bf16AdamW([weight], lr=0.0)
    square = moments(optimizer, weight)["exp_avg_sq"].fill_(1.0)
    nearest = square.clone()
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.001 * 0.25).bfloat16()
    assert square.float().mean().item() == pytest.approx(0.25 + 0.75 * 0.999**steps, rel=0.01)
    assert nearest.unique().tolist() == [1.0]


def test_it_trains_as_fp32_does() -> None:
    mine, other = a_weight(), a_weight()
    found = noisy_steps(Bf16AdamW([mine], lr=0.01, weight_decay=0.1), mine, 300)
    expected = noisy_steps(torch.optim.AdamW([other], lr=0.01, weight_decay=0.1), other, 300)
    moved = (expected - a_weight().detach()).abs().mean()
    assert (found - expected).abs().mean() < 0.01 * moved
    assert (found - expected).mean().abs() < 0.001 * moved


def test_memory_is_half_and_nothing_is_as_long_as_the_weights() -> None:
    size = 5 * CHUNKS["cpu"] + 7
    weight = nn.Parameter(torch.zeros(size))
    weight.grad = torch.ones(size)
    optimizer = Bf16AdamW([weight], lr=0.01)
    state = list(moments(optimizer, weight).values())
    assert sum(tensor.nbytes for tensor in state) == 4 * size
    bits = random_bits(1, CPU, random.Random(0))
    with MemoryCounter() as counter:
        counter.label([weight, weight.grad, bits, *state], "there before")
        before = counter.total
        optimizer.step()
    assert before == 3 * 4 * size + ring_bytes("cpu")
    assert counter.peak - before <= WORKSPACE_BYTES * CHUNKS["cpu"] + 64


def test_rounding_follows_from_the_seed_alone() -> None:
    """Not from what else draws random numbers: ranks that hold the same must stay the same."""

    def trained(seed: int, drawn: int) -> Tensor:
        torch.manual_seed(seed)
        weight = a_weight()
        optimizer = Bf16AdamW([weight], lr=0.01)
        torch.rand(drawn)
        return noisy_steps(optimizer, weight, 5)

    assert torch.equal(trained(1, 0), trained(1, 3))
    assert not torch.equal(trained(1, 0), trained(2, 0))
