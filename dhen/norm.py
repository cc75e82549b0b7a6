"""Layer normalisation over an embedding (arXiv 1607.06450), in fp32 where torch's bf16 kernel is slow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.tape import FP32_BYTES, Tape

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
