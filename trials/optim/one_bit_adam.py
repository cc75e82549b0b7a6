"""One-bit Adam (arXiv 2102.02888, algorithm 1): AdamW while the variance changes, then momentum in one bit per
number.

First stage: AdamW of gradients averaged over ranks, until the variance is steady. Every so many (`lag_of`)
steps the L1 norm of the variance, corrected for its start at zero, is held against the one a lag before; if
the smaller is at least `VARIANCE_RATIO` of the larger, the stage ends. The paper's rule has the same ratio of
norms as they are, over a lag of 1 / (1 - beta2) steps: uncorrected norms grow from zero, and would not be
steady before some 4,000 steps, more than most trainings here have.

Second stage: the variance stays as it is, Adam is linear in the gradient, and ranks no longer average
gradients. Each adds its own to the momentum that all share, and an all-reduce of one bit per number with error
feedback makes the next momentum of them.

Other than in the paper, what is compressed is the momentum divided by the root of the variance, number by number.
It is the same momentum in units that do not differ between numbers: a scale fits a whole block of them, and a
weight whose gradients are a thousand times smaller than its neighbours' gets steps like theirs and not a thousand
times as large ones. (DeepSpeed leaves such weights to masks that users write.) A root that is less than
`LEAST_ROOT` of its tensor's mean counts as that much: a unit that was dead in the first stage may come to life in
the second. In a tensor that had no gradient at all it counts as the mean of all weights.

A worker's vector, one for both, is what it has of the momentum and of its residue: beta1 times the one plus
the other.

Shapes: N dense weights, one after another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import ceil
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import AdamW

from trials.records.job import TrainingConfig

# One bit for a number: signs of blocks of numbers with a scale each, packed into bytes, and what is lost by it.
#
# The compression of 1-bit Adam (arXiv 2102.02888): a number becomes its sign times a scale. Here the scale is
# the mean of magnitudes in a block of numbers, which of all scales loses least. The loss stays where it came
# from and is added to what is compressed next (error feedback, arXiv 1809.07599).
#
# Shapes: N numbers of a vector, Z bytes of their signs, eight in each, K blocks of B numbers, R vectors of
# several ranks.

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
    for place, blocks, packed in _pieces(len(x_N), AT_ONCE[x_N.device.type]):
        piece_N = x_N[place]
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
    for place, blocks, packed in _pieces(numbers, size):
        signs = _signs(device).index_select(0, bits_RZ[:, packed].reshape(-1).int())
        x_RKB = signs.view(ranks, -1, BLOCK).mul_(scale_RK[:, blocks].unsqueeze(2))
        x_KB = x_RKB[0] if ranks == 1 else x_RKB.mean(dim=0)
        yield place, x_KB.view(-1)[: place.stop - place.start]


def _pieces(numbers: int, size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields where each piece lies, its blocks, and the bytes of its signs."""
    for start in range(0, numbers, size):
        stop = min(start + size, numbers)
        blocks = slice(start // BLOCK, ceil(stop / BLOCK))
        signs = slice(blocks.start * BLOCK // SIGNS_PER_BYTE, blocks.stop * BLOCK // SIGNS_PER_BYTE)
        yield slice(start, stop), blocks, signs


@cache
def _signs(device: torch.device) -> Tensor:
    """Returns 1 or -1 for each of the eight signs in a byte, the lowest bit first, (256, 8)."""
    signs = (torch.arange(256).unsqueeze(1) >> torch.arange(SIGNS_PER_BYTE) & 1) * 2 - 1
    return signs.float().to(device)


# An all-reduce of one bit per number each way, with error feedback on both (1-bit Adam, arXiv 2102.02888).
#
# Every rank compresses its vector and sends each chunk to the rank that serves it (all-to-all). The server of a
# chunk averages what has come, compresses the average once more, and sends it to all (all-gather). What a worker
# lost stays in its vector, what a server lost in its residue. Both collectives are of bytes, which gloo and NCCL
# send alike: of each chunk its signs, eight in a byte, then its scales in fp32.
#
# Shapes: N numbers of the vector or of a chunk, R ranks, Z bytes of a chunk's signs, K blocks of it.


class ChunkLayout(NamedTuple):
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
        self.layout = ChunkLayout(numbers, ranks)
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
        received = chunks = self._compressed(vector_N, self.layout.ranks)
        if self._group is not None:  # as a server this rank gets a chunk of each
            received = torch.empty_like(chunks)
            dist.all_to_all_single(received, chunks, group=self._group)
            self.sent_bytes += chunks.nbytes - self.layout.chunk_bytes
        del chunks
        for place, mean in decompressed(*self._parts(received), len(self.residue)):
            self.residue[place].add_(mean)
        del received
        average = self._compressed(self.residue, 1)
        if self._group is not None:
            whole = average.new_empty(self.layout.vector_bytes)
            dist.all_gather_single(whole, average.view(-1), group=self._group)
            self.sent_bytes += whole.nbytes - self.layout.chunk_bytes
            average = whole.view(self.layout.ranks, -1)
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


LOG = logging.getLogger(__name__)
VARIANCE_RATIO = 0.96
"""Ratio of the variance's L1 norms at two looks, the smaller to the larger, from which on it counts as steady
(arXiv 2102.02888)."""
LONGEST_LAG, LOOKS = 1000, 20
"""Most steps between two looks at the variance, 1 / (1 - beta2) as in arXiv 2102.02888, and number of looks in a
training of fewer steps than that allows: it may then be steady after a tenth of them."""
LEAST_ROOT = 0.1
"""Least root of a variance, as a share of the mean root in its tensor."""


class SecondStage:
    """The steps of one-bit Adam with a variance that no longer changes."""

    def __init__(
        self,
        weight_N: Tensor,
        carried_N: Tensor,
        root_N: Tensor,
        betas: tuple[float, float],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Takes tensors over, which every rank has whole.

        Args:
            weight_N: fp32 weights, which steps update.
            carried_N: beta1 times the momentum, in units of the roots, and what this rank has lost.
            root_N: roots of the variance, corrected for its start at zero.
            betas: AdamW's.
            group: the ranks; None for one.
        """
        self.weight_N, self.carried_N, self.root_N = weight_N, carried_N, root_N
        self._betas, self._group = betas, group
        self.all_reduce = CompressedAllReduce(len(carried_N), group, carried_N.device)

    @torch.no_grad()
    def step(self, gradient_N: Tensor, number: int, lr: float, weight_decay: float) -> None:
        """Makes the step of this number from this rank's own gradient, of its share of the batch; a collective."""
        beta1 = self._betas[0]
        self.carried_N.addcdiv_(gradient_N, self.root_N, value=1 - beta1)
        self.weight_N.mul_(1 - lr * weight_decay)
        size = lr / (1 - beta1**number)
        for place, momentum in self.all_reduce(self.carried_N):
            self.weight_N[place].sub_(momentum, alpha=size)
            self.carried_N[place].add_(momentum, alpha=beta1)

    @torch.no_grad()
    def moments(self, steps: int) -> dict[str, Tensor]:
        """Returns a copy of AdamW's two moments, as if AdamW had come here in so many steps; a collective."""
        beta1, beta2 = self._betas
        momentum_N = self.carried_N.clone()
        if self._group is not None:
            dist.all_reduce(momentum_N, group=self._group)
            momentum_N /= dist.get_world_size(self._group)
        return {
            "exp_avg": momentum_N.mul_(self.root_N).div_(beta1),
            "exp_avg_sq": self.root_N.square().mul_(1 - beta2**steps),
        }


def lag_of(config: TrainingConfig, total_examples: int) -> int:
    """Returns the steps between two looks at the variance, for so many examples of all passes: the second look is
    not before the end of the learning rates' warm-up."""
    assert config.batch_size is not None
    warmup = math.ceil((config.warmup_examples or config.warmup_share * total_examples) / config.batch_size)
    return max(1, min(LONGEST_LAG, total_examples // config.batch_size // LOOKS), math.ceil(warmup / 2))


class OneBitAdam(AdamW):
    """One-bit Adam of the dense weights as one vector, or of this rank's part of it in the first stage."""

    def __init__(
        self,
        parameter: nn.Parameter,
        config: TrainingConfig,
        group: dist.ProcessGroup | None,
        sizes: Sequence[int],
        total_examples: int,
        *,
        is_part: bool = False,
    ) -> None:
        """Takes the weights over.

        Args:
            parameter: fp32 weights, (N) or a part of them that pads to equal parts.
            config: resolved settings.
            group: the ranks that train together; None for one.
            sizes: numbers of each dense tensor, in the vector's order.
            total_examples: those of all passes.
            is_part: whether ranks have equal parts of the vector.
        """
        lr, decay = config.dense_learning_rate, config.weight_decay
        super().__init__([parameter], lr=lr, weight_decay=decay, fused=True)
        self._parameter, self.group, self._sizes, self._is_part = parameter, group, sizes, is_part
        self._lag = lag_of(config, total_examples)
        self.steps = 0
        """Number of steps so far."""
        self.looked_at = torch.zeros(2, dtype=torch.float64)
        """Step after which the variance was last looked at, and the norm that it had."""
        self.second_stage: SecondStage | None = None
        """The second stage, once it has begun."""
        self.carried_by_others: tuple[list[Tensor], int] | None = None
        """What this rank is to read of a checkpoint of another number of ranks, and that number, until it is
        read."""

    @property
    def compresses(self) -> bool:
        """Whether the second stage has begun, in which gradients stay each rank's own."""
        return self.second_stage is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes a step from the parameter's gradient: in the first stage averaged over ranks, in the second this
        rank's own."""
        assert closure is None
        if self.second_stage is not None:
            assert self._parameter.grad is not None
            return self.step_of_second_stage(self._parameter.grad)
        self.steps += 1
        super().step()

    def step_of_second_stage(self, gradient_N: Tensor) -> None:
        """Makes a step from this rank's own gradient; a collective."""
        assert self.second_stage is not None
        self.steps += 1
        (settings,) = self.param_groups
        self.second_stage.step(gradient_N, self.steps, settings["lr"], settings["weight_decay"])

    def is_steady(self) -> bool:
        """Tells, after a step of the first stage, whether it is the last one; the same on all ranks."""
        if self.steps % self._lag:
            return False
        variance = self.state[self._parameter]["exp_avg_sq"]
        norm = variance.sum(dtype=torch.float64)
        if self.group is not None:
            if self._is_part:
                dist.all_reduce(norm, group=self.group)
            else:  # alike on all ranks but for what their devices make of it
                dist.broadcast(norm, group=self.group, group_src=0)
        beta2 = self.param_groups[0]["betas"][1]
        now = norm.item() / (1 - beta2**self.steps)
        before, self.looked_at[0], self.looked_at[1] = float(self.looked_at[1]), self.steps, now
        return bool(0 < VARIANCE_RATIO * max(before, now) <= min(before, now))

    @torch.no_grad()
    def freeze(self, weight_N: Tensor, momentum_N: Tensor, variance_N: Tensor) -> None:
        """Begins the second stage with whole vectors, which it overwrites and keeps."""
        beta1, beta2 = self.param_groups[0]["betas"]
        root_N = variance_N.div_(1 - beta2**self.steps).sqrt_()
        mean = root_N.mean()
        for roots in torch.split(root_N, list(self._sizes)):
            of_tensor = roots.mean()
            roots.clamp_(min=torch.where(of_tensor > 0, LEAST_ROOT * of_tensor, mean))
        root_N.add_(self.param_groups[0]["eps"])
        self.begin_second_stage(weight_N, momentum_N.div_(root_N).mul_(beta1), root_N)
        assert self.second_stage is not None
        layout = self.second_stage.all_reduce.layout
        LOG.info(
            "one-bit Adam compresses from step %d on: this rank sends %s bytes per step, where a ring would "
            "send %s of gradients in fp32",
            self.steps + 1,
            f"{layout.sent_bytes:,}",
            f"{round(2 * (layout.ranks - 1) / layout.ranks * 4 * layout.numbers):,}",
        )

    def begin_second_stage(self, weight_N: Tensor, carried_N: Tensor, root_N: Tensor) -> None:
        """Begins the second stage with tensors that have, or are about to be given, what they had after some
        step."""
        self.state.clear()
        betas = self.param_groups[0]["betas"]
        self.second_stage = SecondStage(weight_N, carried_N, root_N, betas, self.group)


# What PowerSGD (arXiv 1905.13727, `trials.training.distributed.power_sgd`) sends of gradients: products of two
# narrow matrices.

MIN_COMPRESSION = 2
"""Times by which a matrix has to become smaller to be compressed, as torch's hook has it."""


class LowRank(NamedTuple):
    """Numbers that are sent of a gradient of n x m."""

    compressed: bool
    p: int
    """Numbers of P (n x r); 0 if it is sent as it is."""
    q: int
    """Numbers of Q (m x r); 0 if it is sent as it is."""
    sent: int

    @classmethod
    def of(cls, n: int, m: int, rank: int) -> Self:
        """Returns the sizes of a gradient by this rank."""
        rank = min(n, m, rank)
        if (n + m) * rank * MIN_COMPRESSION < n * m:
            return cls(True, n * rank, m * rank, (n + m) * rank)
        return cls(False, 0, 0, n * m)


class LowRankSizes(NamedTuple):
    """Numbers of all gradients together."""

    whole: int
    """Numbers that are sent as they are."""
    p: int
    q: int
    matrices: int
    """Number of gradients that are compressed."""
    largest: int
    """Numbers of the largest gradient, by which a bucket may be longer than it is meant to be."""

    @property
    def sent(self) -> int:
        """Numbers that are reduced in a step."""
        return sum(self.by_collective)

    @property
    def by_collective(self) -> tuple[int, int, int]:
        """Numbers that each of the three all-reduces has."""
        return self.whole, self.p, self.q


def low_rank_of(shapes: Iterable[tuple[int, int]], rank: int) -> LowRankSizes | None:
    """Returns what is sent of gradients of these shapes; None without PowerSGD, whose rank is 0."""
    if not rank:
        return None
    numbers = list(shapes)
    found = [LowRank.of(n, m, rank) for n, m in numbers]
    return LowRankSizes(
        whole=sum(one.sent for one in found if not one.compressed),
        p=sum(one.p for one in found),
        q=sum(one.q for one in found),
        matrices=sum(one.compressed for one in found),
        largest=max((n * m for n, m in numbers), default=0),
    )
