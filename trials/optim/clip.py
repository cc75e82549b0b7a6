"""Clipping of the dense part's gradients by their global norm (arXiv 1211.5063, algorithm 1).

The norm is the Euclidean one of the gradients of all dense weights together, as of one vector; where it is
larger than `training.clip_norm`, all of them are multiplied by `clip_norm` / norm. Gradients are those of the
whole batch: averaged over ranks, all micro-batches added up. Where ranks hold parts of them, the parts' squared
norms are added up over the ranks, one number each.

Where ranks no longer average their gradients (one-bit Adam's second stage), the norm is the root mean square of
the norms of the ranks' own gradients, which is at least that of the average: all ranks clip by the same factor, so
that the average keeps its direction.

Embedding tables are left out, of the norm and of the clipping: row-wise Adagrad divides a row's gradient by the
root of its mean squares so far, which is a bound of its own, and engines that shard tables update a row as soon as
its gradient is there, before a norm over all of them could be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.linalg import vector_norm

from trials.cluster.machine import device

SMALLEST_NORM = 1e-6
"""What is added to the norm that is divided by, as `torch.nn.utils.clip_grad_norm_` does."""


class Clip:
    """Clips the gradients of one engine."""

    def __init__(
        self, largest_norm: float | None, process_group: dist.ProcessGroup | None = None, copies: int = 1
    ) -> None:
        """Takes what does not change from step to step.

        Args:
            largest_norm: `training.clip_norm`; None to leave gradients as they are.
            process_group: the ranks that hold a part of the gradients each; None where this rank holds all of
                them.
            copies: number of copies that these ranks hold together.
        """
        self._largest_norm, self._group = largest_norm, process_group
        self._copies = copies
        self._tensor_group: dist.ProcessGroup | None = None
        self._replicated: Sequence[Sequence[slice]] = ()
        self._clipped: Tensor | None = None

    def of_own_gradients(self, process_group: dist.ProcessGroup | None) -> None:
        """From now on these ranks have a whole gradient of their own each, whose average is that of the batch."""
        self._group = process_group
        self._copies = 1 if process_group is None else dist.get_world_size(process_group)

    def over(self, tensor_group: dist.ProcessGroup, replicated: Sequence[Sequence[slice]]) -> None:
        """Takes the norm over the ranks of a tensor group too.

        Args:
            tensor_group: the ranks that have a part of the split weights each, and all of the others.
            replicated: of each gradient that will be clipped, in order, the ranges that all of them have alike.
        """
        self._tensor_group, self._replicated = tensor_group, replicated

    @torch.no_grad()
    def __call__(self, gradients: Iterable[Tensor | None]) -> None:
        """Clips in place what this rank has of the whole batch's gradients, None where a weight has none; a
        collective where ranks hold parts."""
        if self._largest_norm is None:  # before anything is read, which may still be on its way to the host
            return
        mine = [gradient for gradient in gradients if gradient is not None]
        squares = _sum_of_squares(mine)
        if self._tensor_group is not None:
            self._count_once(squares, mine)
        if self._group is not None:
            squares = squares.to(device())  # offloaded parts are on the host, where NCCL does not send
            dist.all_reduce(squares, group=self._group)
            squares /= self._copies
        # multiplied by 1 where the norm is small enough: nobody waits for an accelerator to know it
        factor = (self._largest_norm / (squares.sqrt() + SMALLEST_NORM)).clamp_(max=1.0)
        for gradient in mine:
            gradient.mul_(factor.to(gradient.device))
        clipped = (factor < 1.0).long()
        self._clipped = clipped if self._clipped is None else clipped + self._clipped

    def _count_once(self, squares: Tensor, mine: Sequence[Tensor]) -> None:
        """Adds the other tensor ranks' squares to this rank's; each gives its share of what all have alike."""
        assert self._tensor_group is not None
        parts = [
            gradient[where]
            for gradient, ranges in zip(mine, self._replicated, strict=True)
            for where in ranges
        ]
        if parts:
            squares -= (1 - 1 / dist.get_world_size(self._tensor_group)) * _sum_of_squares(parts)
        dist.all_reduce(squares, group=self._tensor_group)

    def clipped_steps(self) -> int:
        """Returns the number of steps since the last call whose gradients were longer than the largest norm; the
        same on all ranks. It waits for an accelerator."""
        counted, self._clipped = self._clipped, None
        return 0 if counted is None else int(counted)


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Returns the squared norm of all parts as one vector, a number; no part is copied."""
    return torch.stack([vector_norm(part).square() for part in parts]).sum()
