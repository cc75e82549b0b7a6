"""Parts of a module on several ranks: what each rank keeps of the weights, and what the ranks send each other.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053, section 3). Ranks of a group see the same examples. A
linear map is split by columns (each rank has some of the outputs) or by rows (each has some of the inputs, and
outputs are summed over the ranks); a map by rows takes what one by columns puts out, so that nothing is sent
between the two. What is not split is computed by all ranks alike, from the same numbers, dropout included.

A module says here what is split; the ranks themselves are somebody else's (`RankGroup`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

How = Literal["columns", "rows", "gathered"]
"""How a linear map is split: by columns, by rows, or by columns with outputs that every rank gets whole."""


class RankGroup(Protocol):
    """The ranks over which modules are split, as seen from one of them; calls are collectives."""

    rank: int
    """Number of this rank in the group, from 0."""
    size: int

    def sum_(self, x: Tensor) -> None:
        """Replaces x, which is contiguous, by the sum of all ranks' x."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x, which have one shape, stacked along a new first dimension."""


class ParameterSplit(NamedTuple):
    """How a parameter is split: along a dimension, in which there are `blocks` one after another, each of which is
    cut into as many parts as there are ranks."""

    dim: int
    blocks: int = 1

    def runs(self, whole: Sequence[int], size: int) -> tuple[int, int, int]:
        """Returns of how many runs of consecutive numbers a rank's part of a parameter of shape `whole` consists,
        how long they are, and how far apart in the whole parameter.

        Run k of rank r begins there at k times the distance plus r times the length, and follows run k - 1 in the
        part.
        """
        apart = whole[self.dim] // self.blocks * prod(whole[self.dim + 1 :])
        return prod(whole[: self.dim]) * self.blocks, apart // size, apart

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Returns a copy of a rank's part."""
        count, length, apart = self.runs(whole.shape, size)
        shape = list(whole.shape)
        shape[self.dim] //= size
        return whole.reshape(count, apart)[:, rank * length : (rank + 1) * length].reshape(shape).clone()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole of all ranks' parts."""
        shape = list(parts[0].shape)
        shape[self.dim] *= len(parts)
        count, length, _ = self.runs(shape, len(parts))
        return torch.cat([part.reshape(count, length) for part in parts], dim=1).reshape(shape)


def keep_part(module: nn.Module, name: str, split: ParameterSplit, group: RankGroup) -> None:
    """Leaves this rank's part of a parameter in its module."""
    whole = getattr(module, name)
    part = split.part(whole.detach(), group.rank, group.size)
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    module.__dict__.setdefault("split_parameters", {})[name] = split


def split_parameters(model: nn.Module) -> dict[str, ParameterSplit]:
    """Returns how each parameter of which a part was kept is split, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: split
        for prefix, module in model.named_modules()
        for name, split in module.__dict__.get("split_parameters", {}).items()
    }


def how_split(maps: Sequence[tuple[int, int]], size: int) -> list[How | None]:
    """Returns how linear maps that follow one another are split, given the inputs and outputs of each.

    Two that follow one another are split by columns and by rows. One that is left is split by columns, and its
    outputs are gathered. None: the map stays whole, because the ranks do not divide its outputs.
    """
    found: list[How | None] = []
    while len(found) < len(maps):
        left = len(maps) - len(found)
        if size == 1 or maps[len(found)][1] % size:
            found.append(None)
        else:
            found += ["columns", "rows"] if left > 1 else ["gathered"]
    return found


@contextmanager
def apart(group: RankGroup, device: torch.device) -> Iterator[None]:
    """Draws other random numbers on each rank inside, as dropout of split outputs needs; ranks whose generators
    were alike before have alike ones afterwards.

    What is drawn follows from the generator, so that a recomputation draws it again.
    """
    seed = int(torch.randint(2**31, ()))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed + group.rank)
        yield


def sums_gradients(x: Tensor, group: RankGroup) -> Tensor:
    """x, whose gradient is the sum over the ranks: the entry of what is split (the paper's f).

    What reads it must make a gradient of its own, as products do: the sum takes its place.
    """
    return _exchanged(x, group, lambda x, _: x.view_as(x), _sum)


def summed(x: Tensor, group: RankGroup) -> Tensor:
    """The sum over the ranks in place of x, which nothing else has read: the exit of what is split (the paper's
    g)."""
    return _exchanged(x, group, _sum, lambda gradient, _: gradient)


def summed_both_ways(x: Tensor, group: RankGroup) -> Tensor:
    """The sum over the ranks, which each rank goes on with in its own part: gradients are summed too."""
    return sums_gradients(summed(x, group), group)


def gathered(x_BV: Tensor, group: RankGroup) -> Tensor:
    """All ranks' numbers one after another in the last dimension."""
    return _exchanged(x_BV, group, _stacked, _own)


def own(x_BV: Tensor, group: RankGroup) -> Tensor:
    """This rank's part of the numbers in the last dimension, of which each rank has all; as a copy."""
    return _exchanged(x_BV, group, _own, _stacked)


Exchange = Callable[[Tensor, RankGroup], Tensor]


def _exchanged(x: Tensor, group: RankGroup, forward: Exchange, backward: Exchange) -> Tensor:
    return _Exchanged.apply(x, group, forward, backward)  # type: ignore[no-untyped-call, no-any-return]


class _Exchanged(torch.autograd.Function):
    """What ranks do with a tensor in forward, and with its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        y = forward(x, group)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange(gradient, ctx.group), None, None, None


def _sum(x: Tensor, group: RankGroup) -> Tensor:
    x = x.contiguous()
    group.sum_(x)
    return x


def _stacked(x: Tensor, group: RankGroup) -> Tensor:
    """All ranks' parts of the last dimension in their places."""
    return group.gather(x.contiguous()).movedim(0, -2).flatten(-2)


def _own(x: Tensor, group: RankGroup) -> Tensor:
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()
