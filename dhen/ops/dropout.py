"""Dropout at little cost, for CPUs (Srivastava et al., JMLR 2014; scaled by 1 / (1 - p) in training).

PyTorch's CPU kernel draws one number per element from a serial generator, which was 28 to 44 % of a training
step (docs/decisions/0008-the-training-step.md). Here eight bits decide an element, so the probability is
rounded to a multiple of 1/256, and masks are applied to the bits of the numbers as integers. The bits are
the exclusive or of two pools of random bits, each from a place that PyTorch's generator draws anew for
every mask.
`dhen.ops.linear` has dropout, ReLU and a linear map in one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

POOL_WORDS = 2**17
"""Length of a pool, in words of eight bytes: a megabyte."""
LEVELS = 256
"""Probabilities that one random byte tells apart."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a floating-point number."""


def drop(x: Tensor, p: float) -> Tensor:
    """Zeroes each element of a CPU tensor with probability `p` (rounded).

    Whoever calls it applies `dropout_scale`.
    """
    return _Drop.apply(x, p)  # type: ignore[no-untyped-call, no-any-return]


def dropout_scale(p: float) -> float:
    """What elements must be multiplied by, before `drop` or after it, to keep their mean."""
    return LEVELS / (LEVELS - _threshold(p))


def keep_mask(x: Tensor, p: float) -> Tensor:
    """int8 in the shape of x: -1 (all bits set) where an element is kept, 0 where it is dropped."""
    draws = random_bytes(x.numel()).view(x.shape)
    last = _threshold(p) - 1 - LEVELS // 2  # the largest signed byte that drops
    # clamped to {last, last + 1}, then taken from last: {0, -1}
    return torch.rsub(draws.clamp_(max(last, -LEVELS // 2), last + 1), last)


def random_bytes(count: int) -> Tensor:
    """int8 of (count), uniform; which ones follows from PyTorch's generator."""
    drawn = torch.empty(-(-count // 8), dtype=torch.int64)
    for chunk in torch.split(drawn, POOL_WORDS // 2):
        words = len(chunk)
        first, second = torch.randint(0, POOL_WORDS - words, (2,)).tolist()
        torch.bitwise_xor(pools()[0, first : first + words], pools()[1, second : second + words], out=chunk)
    return drawn.view(torch.int8)[:count]


@cache
def pools() -> Tensor:
    """int64 of (2, POOL_WORDS): always the same random bits."""
    generator = torch.Generator().manual_seed(POOL_WORDS)
    return torch.empty(2, POOL_WORDS, dtype=torch.int64).random_(-(2**63), None, generator=generator)


def where_kept(keep: Tensor, x: Tensor) -> Tensor:
    """x where the mask is set, else 0."""
    return keep.to(_bits(x).dtype).bitwise_and_(_bits(x)).view(x.dtype)


def where_positive(y: Tensor, x: Tensor) -> Tensor:
    """x where y is above zero, else 0; no element of y is below."""
    passed = _bits(y).clamp_max(1)  # the bits of numbers above zero are integers above zero
    return passed.mul_(_bits(x)).view(x.dtype)


def _threshold(p: float) -> int:
    """Of 256 equally likely bytes, how many drop an element."""
    return min(round(p * LEVELS), LEVELS - 1)


def _bits(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.element_size()])


class _Drop(torch.autograd.Function):
    """x where the mask is set; so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        keep = keep_mask(x, p)
        ctx.save_for_backward(keep)
        return where_kept(keep, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return where_kept(keep, gradient), None
