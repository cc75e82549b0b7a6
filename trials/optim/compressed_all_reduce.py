"""An all-reduce of one bit per number each way, with error feedback on both (1-bit Adam, arXiv 2102.02888).

Every rank compresses its vector and sends each chunk to the rank that serves it (all-to-all). The server of a
chunk averages what has come, compresses the average once more, and sends it to all (all-gather). What a worker
lost stays in its vector, what a server lost in its residue. Both collectives are of bytes, which gloo and NCCL
send alike: of each chunk its signs, eight in a byte, then its scales in fp32.

Shapes: N numbers of the vector or of a chunk, R ranks, Z bytes of a chunk's signs, K blocks of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trials.optim.one_bit import (
    AT_ONCE,
    BLOCK,
    SCALE_BYTES,
    SIGNS_PER_BYTE,
    WORKSPACE_BYTES,
    compress,
    decompressed,
)


class Layout(NamedTuple):
    """How a vector is cut into equal chunks of whole blocks, one for each rank; what is beyond its end is
    padding."""

    numbers: int
    """Length of the vector."""
    ranks: int

    @property
    def chunk(self) -> int:
        """Numbers of a chunk, padding included."""
        return BLOCK * ceil(ceil(self.numbers / BLOCK) / self.ranks)

    @property
    def sign_bytes(self) -> int:
        """Bytes of a chunk's signs."""
        return self.chunk // SIGNS_PER_BYTE

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a compressed chunk."""
        return self.sign_bytes + SCALE_BYTES * (self.chunk // BLOCK)

    @property
    def vector_bytes(self) -> int:
        """Bytes of all compressed chunks: what a rank gives to the all-to-all, and what the all-gather gives
        it."""
        return self.ranks * self.chunk_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave a rank in an all-reduce."""
        return 2 * (self.ranks - 1) * self.chunk_bytes

    def workspace_bytes(self, device: str) -> int:
        """Returns what an all-reduce holds for a moment, on `cpu` or `cuda`: what is sent, as it is made and as it
        is put together, or what has come; and the piece that is compressed."""
        at_once = WORKSPACE_BYTES * min(AT_ONCE[device], self.chunk * self.ranks)
        return (2 if self.ranks > 1 else 1) * self.vector_bytes + at_once

    def served(self, rank: int) -> slice:
        """Returns where the chunk that a rank serves lies in the vector, without padding."""
        return slice(*(min(place * self.chunk, self.numbers) for place in (rank, rank + 1)))


class CompressedAllReduce:
    """The all-reduce of one vector, step after step; every rank makes the same calls."""

    def __init__(self, numbers: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Makes room for a vector of so many numbers.

        Args:
            numbers: length of the vector.
            group: the ranks; None for one rank, which compresses as if there were others and sends nothing.
            device: where the vector lies.
        """
        self._group = group
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.layout = Layout(numbers, ranks)
        self.served = self.layout.served(rank)
        """Where the chunk that this rank serves lies in the vector."""
        self.residue = torch.zeros(self.served.stop - self.served.start, device=device)
        """What this rank, as a server, has lost and not sent yet (N of its chunk)."""
        self.sent_bytes = 0
        """Bytes that have left this rank for others so far."""

    @torch.no_grad()
    def __call__(self, vector_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields the average over ranks piece by piece, alike on all: where it lies, and its numbers in fp32.

        `vector_N` is left with what this rank, as a worker, has lost.
        """
        received = self._exchanged(self._compressed(vector_N, self.layout.ranks))
        for place, mean in decompressed(*self._parts(received), len(self.residue)):
            self.residue[place].add_(mean)
        del received
        average = self._gathered(self._compressed(self.residue, 1))
        bits_RZ, scale_RK = self._parts(average)
        yield from decompressed(bits_RZ.reshape(1, -1), scale_RK.reshape(1, -1), len(vector_N))

    def _compressed(self, vector_N: Tensor, chunks: int) -> Tensor:
        """Returns uint8 of (chunks, `chunk_bytes`)."""
        layout = self.layout
        bits_Z = torch.zeros(chunks * layout.sign_bytes, dtype=torch.uint8, device=vector_N.device)
        scale_K = torch.zeros(chunks * layout.chunk // BLOCK, device=vector_N.device)
        compress(vector_N, bits_Z, scale_K)
        return torch.cat([bits_Z.view(chunks, -1), scale_K.view(chunks, -1).view(torch.uint8)], dim=1)

    def _parts(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns signs (R, Z) and scales (R, K) of compressed chunks."""
        signs = self.layout.sign_bytes
        return chunks[:, :signs], chunks[:, signs:].contiguous().view(torch.float32)

    def _exchanged(self, chunks: Tensor) -> Tensor:
        """Returns what all ranks have for this one as a server, a chunk of each."""
        if self._group is None:
            return chunks
        received = torch.empty_like(chunks)
        dist.all_to_all_single(received, chunks, group=self._group)
        self.sent_bytes += chunks.nbytes - self.layout.chunk_bytes
        return received

    def _gathered(self, chunk: Tensor) -> Tensor:
        """Returns the chunks of all servers."""
        if self._group is None:
            return chunk
        whole = chunk.new_empty(self.layout.vector_bytes)
        dist.all_gather_single(whole, chunk.view(-1), group=self._group)
        self.sent_bytes += whole.nbytes - self.layout.chunk_bytes
        return whole.view(self.layout.ranks, -1)
