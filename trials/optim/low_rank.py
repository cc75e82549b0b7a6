"""What PowerSGD (arXiv 1905.13727, `trials.distributed.power_sgd`) sends of gradients: products of two narrow
matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

MIN_COMPRESSION = 2
"""Times by which a matrix has to become smaller to be compressed, as torch's hook has it."""


class LowRank(NamedTuple):
    """Numbers that are sent of a gradient of n x m."""

    compressed: bool
    p: int
    """Numbers of P (n x r); 0 where it is sent as it is."""
    q: int
    """Numbers of Q (m x r); 0 where it is sent as it is."""
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
