"""Small collectives beside the training itself: means, rank 0's numbers, parts of a vector.

With them all ranks decide alike. One rank asks nobody.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trials.cluster.machine import device
from trials.ranks import Ranks


def mean_over(ranks: Ranks, values: Tensor) -> Tensor:
    """The mean of all ranks' values, element by element; a collective."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values = values / ranks.world
    return values


def all_agree(ranks: Ranks, here: bool) -> bool:
    """Whether `here` holds on every rank; a collective."""
    if ranks.world == 1:
        return here
    holds = torch.tensor(float(here), device=device())
    dist.all_reduce(holds, dist.ReduceOp.MIN)
    return bool(holds)


def as_first(ranks: Ranks, numbers: list[float]) -> list[float]:
    """Rank 0's numbers, bit for bit, in place of each rank's own; a collective."""
    if ranks.world == 1:
        return numbers
    told = torch.tensor(numbers, dtype=torch.float64, device=device())
    dist.broadcast(told, 0)
    return told.tolist()


def joined(ranks: Ranks, part_N: Tensor, sizes: list[int]) -> Tensor | None:
    """The vector of which each rank has a part, of these sizes; on rank 0 alone, else None; a collective."""
    if ranks.world == 1:
        return part_N
    longest = max(sizes)
    padded = torch.nn.functional.pad(part_N, (0, longest - len(part_N)))
    parts = [torch.empty_like(padded) for _ in sizes] if ranks.first else None
    dist.gather(padded, parts)
    if parts is None:
        return None
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
