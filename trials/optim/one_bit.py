"""One bit for a number: signs of blocks of numbers with a scale each, packed into bytes, and what is lost by it.

The compression of 1-bit Adam (arXiv 2102.02888): a number becomes its sign times a scale. Here the scale is the
mean of magnitudes in a block of numbers, which of all scales loses least. The loss stays where it came from and is
added to what is compressed next (error feedback, arXiv 1809.07599).

Shapes: N numbers of a vector, Z bytes of their signs, eight in each, K blocks of B numbers, R vectors of several
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 1024
"""Numbers that share a scale, so that 1 + 32 / 1024 bits are sent for each."""
SIGNS_PER_BYTE, SCALE_BYTES = 8, 4
AT_ONCE = {"cpu": 2**16, "cuda": 2**22}
"""Numbers that are compressed at a time, whole blocks; on a CPU as many as its cache has room for."""
WORKSPACE_BYTES = 9
"""Bytes of workspace per number that is worked on at a time: in fp32 two pieces, as one follows another, and signs
as bytes or places in a table."""
GATHER_LOW_BITS = 0x0102040810204080
"""Multiplied by it, a word of eight bytes that are 0 or 1 has them as the bits of its highest byte."""


@torch.no_grad()
def compress(x_N: Tensor, bits_Z: Tensor, scale_K: Tensor) -> None:
    """Compresses a vector, and leaves in it what was lost.

    Args:
        x_N: the vector, fp32.
        bits_Z: where signs go, uint8, with room for whole blocks.
        scale_K: where scales go, fp32.
    """
    for start, stop in _pieces(len(x_N), AT_ONCE[x_N.device.type]):
        piece_N, blocks, packed = x_N[start:stop], _blocks(start, stop), _bytes(start, stop)
        missing = -len(piece_N) % BLOCK
        x_KB = (pad(piece_N, (0, missing)) if missing else piece_N).view(-1, BLOCK)
        scale_K[blocks] = x_KB.abs().mean(dim=1)
        if missing:  # the padding has no size
            scale_K[blocks.stop - 1] *= BLOCK / (BLOCK - missing)
        positive_KB, scale_K1 = x_KB >= 0, scale_K[blocks].unsqueeze(1)
        words = positive_KB.view(-1).view(torch.int64)
        bits_Z[packed] = (words * GATHER_LOW_BITS).bitwise_right_shift_(56).to(torch.uint8)
        piece_N.sub_(torch.where(positive_KB, scale_K1, -scale_K1).view(-1)[: len(piece_N)])


def decompressed(bits_RZ: Tensor, scale_RK: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields the mean of R compressed vectors piece by piece: where a piece lies, and its numbers (N), fp32.

    Args:
        bits_RZ: signs, uint8.
        scale_RK: scales, fp32.
        numbers: length of a vector.
    """
    ranks, device = len(bits_RZ), bits_RZ.device
    size = max(BLOCK, AT_ONCE[device.type] // ranks // BLOCK * BLOCK)
    for start, stop in _pieces(numbers, size):
        blocks, packed = _blocks(start, stop), _bytes(start, stop)
        signs = _signs(device).index_select(0, bits_RZ[:, packed].reshape(-1).int())
        x_RKB = signs.view(ranks, -1, BLOCK).mul_(scale_RK[:, blocks].unsqueeze(2))
        x_KB = x_RKB[0] if ranks == 1 else x_RKB.mean(dim=0)
        yield slice(start, stop), x_KB.view(-1)[: stop - start]


def _pieces(numbers: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last number, excluded, of each piece."""
    for start in range(0, numbers, size):
        yield start, min(start + size, numbers)


def _blocks(start: int, stop: int) -> slice:
    """Returns the blocks of a piece."""
    return slice(start // BLOCK, ceil(stop / BLOCK))


def _bytes(start: int, stop: int) -> slice:
    """Returns the bytes of a piece's signs."""
    blocks, size = _blocks(start, stop), BLOCK // SIGNS_PER_BYTE
    return slice(blocks.start * size, blocks.stop * size)


@cache
def _signs(device: torch.device) -> Tensor:
    """Returns 1 or -1 for each of the eight signs in a byte, the lowest bit first, (256, 8)."""
    signs = (torch.arange(256).unsqueeze(1) >> torch.arange(SIGNS_PER_BYTE) & 1) * 2 - 1
    return signs.float().to(device)
