"""Norms over an embedding: layer normalisation (arXiv 1607.06450), in fp32 where torch's bf16 kernel is slow, and
root mean square normalisation (arXiv 1910.07467, equation 4), in one operation on CPUs, where torch has none.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.cost import NORM_FLOPS, RMS_NORM_FLOPS, Costs, elementwise_cost
from dhen.tape import FP32_BYTES, LinearBytes, Tape

NormKind = Literal["layer", "rms", "none"]
RMS_EPS = 1e-5

FAST_BF16_MULTIPLE = 16
"""In bf16, lengths that are no multiple of it took 2 to 6 times as long as fp32 with its casts, and 16 itself
up to 3 times with two threads (lengths 8 to 64, CPU with AVX-512 and AMX, torch 2.13, 2026-11-21)."""
CACHE_LINE = 16
"""fp32 numbers in one. Threads sum the gradients of weight and bias in neighbouring memory: with fewer numbers
each, two threads took twice as long as one, so there weight and bias are applied outside of the kernel."""


class LayerNorm(nn.LayerNorm):
    """(..., D) -> (..., D)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._shares_cache_lines = dim < CACHE_LINE
        self._fast_bf16 = _fast_in_bf16(dim)

    def forward(self, input: Tensor) -> Tensor:
        """In the precision of the input; statistics are fp32 either way."""
        if input.device.type != "cpu" or input.dtype is torch.float32 or self._fast_bf16:
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias.float()
        if self._shares_cache_lines and torch.is_grad_enabled() and torch.get_num_threads() > 1:
            y = F.layer_norm(input.float(), self.normalized_shape, eps=self.eps)
            return torch.addcmul(bias, y, weight).to(input.dtype)
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


def _fast_in_bf16(dim: int) -> bool:
    return dim > FAST_BF16_MULTIPLE and dim % FAST_BF16_MULTIPLE == 0


def norm_tape(tape: Tape, x: int, embeddings: int, dim: int) -> int:
    """The memory of `LayerNorm` of so many embeddings; several threads are assumed, which takes more."""
    weights = [(dim, 1), (dim, 1)]
    cpu = tape.device == "cpu"
    casts = cpu and tape.itemsize != FP32_BYTES and not _fast_in_bf16(dim)
    given, x = x, tape.cast(x, FP32_BYTES) if casts else x
    outside = casts and dim < CACHE_LINE
    statistics = tape.scratch(2 * embeddings, itemsize=tape.itemsize if cpu and not casts else FP32_BYTES)
    y = tape.operation(
        embeddings * dim,
        [x],
        saves=[x, statistics],
        parameters=() if outside else weights,
        itemsize=FP32_BYTES if casts else None,
    )
    if outside:
        gradient = tape.held(2 * embeddings * dim, itemsize=FP32_BYTES)
        y = tape.operation(
            embeddings * dim,
            [y],
            saves=[y],
            parameters=weights,
            itemsize=FP32_BYTES,
            backward_running=gradient,
        )
    y = tape.cast(y, tape.itemsize) if casts else y
    tape.refer(given)
    return y


class RmsNorm(nn.Module):
    """(..., D) -> (..., D): w * x / sqrt(mean(x^2))."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, input: Tensor) -> Tensor:
        """In the precision of the input; computed in fp32."""
        if input.device.type != "cpu":
            return F.rms_norm(input, self.weight.shape, self.weight, RMS_EPS)
        return _RmsNorm.apply(input, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class _RmsNorm(torch.autograd.Function):
    """Keeps x and one number an embedding for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(RMS_EPS).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        wide, normed = gradient.float(), x.float() * scale
        by_weight = (wide * normed).flatten(0, -2).sum(0)
        wide = wide * weight
        along = (wide * normed).mean(dim=-1, keepdim=True)
        by_x = wide.sub_(normed.mul_(along)).mul_(scale)
        return by_x.to(x.dtype), by_weight.to(weight.dtype)


def rms_norm_tape(tape: Tape, x: int, embeddings: int, dim: int) -> int:
    """The memory of `RmsNorm`."""
    values, casts = embeddings * dim, tape.device == "cpu" and tape.itemsize != FP32_BYTES
    wide = tape.held(values, itemsize=FP32_BYTES).each
    each = tape.held(embeddings, itemsize=FP32_BYTES).each
    beside = each + (3 * wide - tape.held(values).each if casts else 2 * wide)
    return tape.operation(
        values,
        [x],
        saves=[x, tape.scratch(embeddings, itemsize=FP32_BYTES)],
        parameters=[(dim, 1)],
        running=LinearBytes(2 * wide if casts else 0),
        backward_running=LinearBytes(beside if tape.device == "cpu" else 0),
    )


def build_norm(kind: NormKind, dim: int) -> nn.Module:
    """(..., D) -> (..., D)."""
    if kind == "none":
        return nn.Identity()
    return LayerNorm(dim) if kind == "layer" else RmsNorm(dim)


def norm_cost(kind: NormKind, embeddings: int, dim: int) -> Costs:
    """The cost of `build_norm` over so many embeddings."""
    if kind == "none":
        return ()
    parameters, flops = (2 * dim, NORM_FLOPS) if kind == "layer" else (dim, RMS_NORM_FLOPS)
    return (elementwise_cost("norm", embeddings * dim, flops_each=flops, parameters=parameters),)


def any_norm_tape(tape: Tape, x: int, kind: NormKind, embeddings: int, dim: int) -> int:
    """The memory of `build_norm` over so many embeddings."""
    if kind == "none":
        return x
    return (norm_tape if kind == "layer" else rms_norm_tape)(tape, x, embeddings, dim)


# Dropout at little cost, for CPUs (Srivastava et al., JMLR 2014; scaled by 1 / (1 - p) in training).
#
# PyTorch's CPU kernel draws one number per element from a serial generator, which was 28 to 44 % of a training
# step (docs/decisions/0008-the-training-step.md). Here eight bits decide an element, so the probability is
# rounded to a multiple of 1/256, and masks are applied to the bits of the numbers as integers. The bits are
# the exclusive or of two pools of random bits, each from a place that PyTorch's generator draws anew for
# every mask.
# `dhen.ops.linear` has dropout, ReLU and a linear map in one.

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
    """int8 in the shape of x: -1 (all bits set) where an element is kept, 0 if it is dropped."""
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
