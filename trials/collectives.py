"""Small collectives beside the training itself: means, rank 0's numbers, parts of a vector.

With them all ranks decide alike. One rank asks nobody.

Shapes: N rows of a part, C columns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trials.cluster.machine import device
from trials.ranks import Ranks


def mean_over(ranks: Ranks, values: Tensor) -> Tensor:
    """Returns the mean of all ranks' values, element by element; a collective."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values = values / ranks.world
    return values


def all_agree(ranks: Ranks, holds_here: bool) -> bool:
    """Tells whether `holds_here` is true on every rank; a collective."""
    if ranks.world == 1:
        return holds_here
    agreed = torch.tensor(float(holds_here), device=device())
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def as_first(ranks: Ranks, numbers: list[float]) -> list[float]:
    """Returns rank 0's numbers, bit for bit, in place of each rank's own; a collective."""
    if ranks.world == 1:
        return numbers
    shared = torch.tensor(numbers, dtype=torch.float64, device=device())
    dist.broadcast(shared, 0)
    return shared.tolist()


def gathered(ranks: Ranks, part_NC: Tensor) -> Tensor:
    """Returns, on the host, the rows of all ranks' parts one after another, of which each has any number; a
    collective."""
    if ranks.world == 1:
        return part_NC
    size = torch.tensor([len(part_NC)], device=device())
    sizes = [torch.empty_like(size) for _ in range(ranks.world)]
    dist.all_gather(sizes, size)
    counts = [int(count) for count in sizes]
    padded = torch.nn.functional.pad(part_NC, (0, 0, 0, max(counts) - len(part_NC))).to(device())
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).cpu()


def joined(ranks: Ranks, part_N: Tensor, sizes: list[int]) -> Tensor | None:
    """Returns, on rank 0 alone, the vector of which each rank has a part of the given size; None elsewhere; a
    collective."""
    if ranks.world == 1:
        return part_N
    longest = max(sizes)
    padded = torch.nn.functional.pad(part_N, (0, longest - len(part_N)))
    padded_parts = [torch.empty_like(padded) for _ in sizes] if ranks.first else None
    dist.gather(padded, padded_parts)
    if padded_parts is None:
        return None
    return torch.cat([padded_part[:size] for padded_part, size in zip(padded_parts, sizes, strict=True)])
