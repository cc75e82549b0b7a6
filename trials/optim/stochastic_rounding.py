"""fp32 into fp16 by stochastic rounding: up or down at random, so that the mean is the number itself.

Updates that are small beside a weight survive on average, which rounding to the nearest loses (Gupta et al.,
arXiv 1502.02551). Random bits are added below fp16's mantissa, and what is below it then cut off. The bits are
a hash of a counter and of the number's place (splitmix64's, Steele et al., OOPSLA 2014), the same on every
rank and device; the counter is all that a checkpoint has to keep.

Shapes: R rows of a table, D its columns, N rows of it that are written, W words of random bits per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BELOW = 2**13 - 1
"""Number of the bits of fp32's mantissa that fp16's lacks."""
SIGN = -(2**31)
LARGEST = 65504.0
SMALLEST_NORMAL = (127 - 14) << 23
"""The smallest normal number of fp16, 2^-14, as the bits of an fp32. Below it, fp16's numbers are as far apart as
from there up to twice that: what is below is lifted by it, and put down again."""
AT_ONCE = {"cpu": 2**16, "cuda": 2**22}
"""Numbers that are rounded at a time: on a CPU as many as its cache has room for."""
WORKSPACE_BYTES = 16
"""Bytes of workspace per number that is rounded: four numbers of four bytes (trials/memory/counter.py counts as
many)."""
BITS_PER_WORD, BITS_PER_NUMBER = 64, 16
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class StochasticRounding:
    """Writes fp32 numbers into fp16 tables; every write has random bits of its own."""

    def __init__(self, seed: int) -> None:
        self.state = torch.tensor(_signed(_mixed(seed)), dtype=torch.int64)
        """The counter, to save and to load into."""

    def write(
        self, table_RD: Tensor, rows_N: Tensor, values_ND: Tensor, number_N: Tensor | None = None
    ) -> None:
        """Puts values into rows; where a row comes several times, it must be with the same values.

        Random bits follow from the rows' numbers; `number_N` are others to take, for rows of a cache.
        """
        self.state.add_(1)
        key, size = self._key(0), _rows_at_once(table_RD)
        parts = (rows_N, rows_N if number_N is None else number_N, values_ND)
        for rows, numbers, values in zip(*(torch.split(part, size) for part in parts), strict=True):
            bits = random_bits(numbers, table_RD.shape[1], key)
            table_RD.index_copy_(0, rows, rounded(values, bits))

    def multiply(self, tables: Sequence[Tensor], factor: Tensor | float) -> None:
        """Multiplies whole tables, each (R, D), by a number or by one for each row, (R, 1)."""
        self.state.add_(1)
        for index, table_RD in enumerate(tables):
            key, size = self._key(index), _rows_at_once(table_RD)
            for start in range(0, len(table_RD), size):
                rows_RD = table_RD[start : start + size]
                by = factor[start : start + size] if isinstance(factor, Tensor) else factor
                rows = torch.arange(start, start + len(rows_RD), device=rows_RD.device)
                rows_RD.copy_(rounded(rows_RD.float().mul_(by), random_bits(rows, rows_RD.shape[1], key)))

    def _key(self, index: int) -> int:
        """Returns the key of one of several tables, of which other ranks may have fewer: the counter is the same
        on all."""
        return _mixed(_mixed(int(self.state)) + index) >> 2  # places are added to it


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Returns fp16 of fp32 values, each one of its two neighbours.

    A number that fp16 has stays, one beyond its range becomes its largest, and one that is not finite becomes NaN,
    so that it is noticed.
    Without comparisons, which take a CPU ten times as long as arithmetic.

    Args:
        values: of any shape.
        bits: of the same shape, int32 of 13 random bits.
    """
    clamped = values.clamp(-LARGEST, LARGEST)
    pattern = clamped.view(torch.int32)
    small = (pattern & ~SIGN).sub_(SMALLEST_NORMAL).bitwise_right_shift_(31)  # -1, or 0 from there on
    lift = small.bitwise_and_(SMALLEST_NORMAL).bitwise_or_(pattern & SIGN).view(torch.float32)
    clamped.add_(lift)
    pattern.add_(bits).bitwise_and_(~BELOW)
    return clamped.sub_(lift).add_(values * 0.0).half()


def random_bits(rows_N: Tensor, columns: int, key: int) -> Tensor:
    """Returns int32 of (N, columns), 13 random bits each, which follow from row, column and key."""
    words = -(-columns * BITS_PER_NUMBER // BITS_PER_WORD)
    x_NW = rows_N.unsqueeze(1) * words + torch.arange(key, key + words, device=rows_N.device)
    for shift, factor in MIX:
        x_NW.bitwise_xor_(_shifted(x_NW, shift)).mul_(_signed(factor))
    x_NW.bitwise_xor_(_shifted(x_NW, 31))
    return x_NW.view(torch.int16)[:, :columns].int().bitwise_and_(BELOW)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right, with zeros from the left."""
    return (x >> bits).bitwise_and_((1 << (BITS_PER_WORD - bits)) - 1)


def _mixed(x: int) -> int:
    """Returns splitmix64's output of an unsigned word."""
    mask = (1 << BITS_PER_WORD) - 1
    x = (x + GOLDEN) & mask
    for shift, factor in MIX:
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Returns the int64 with the bits of an unsigned word."""
    return x - (1 << BITS_PER_WORD) if x >> (BITS_PER_WORD - 1) else x


def _rows_at_once(table_RD: Tensor) -> int:
    return max(1, AT_ONCE[table_RD.device.type] // table_RD.shape[1])
