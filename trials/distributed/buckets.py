"""Buckets: weights that lie one after another in one tensor, of which each rank owns an equal part.

ZeRO's stages 1 and 2 (`trials.distributed.zero`) and ZeRO-Offload (`trials.distributed.zero_offload`) hold a model
in them. The own part has fp32 master weights, which the rank's optimizer updates. Where the model computes in
fp32 on the device of the masters, these need no memory: they are the part of the weights itself. Else they are
tensors of their own, as long as the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trials.checkpoint.dcp_vectors import FlatPieces, Piece
from trials.memory.limit import on_host
from trials.optim.adamw import MOMENTS, moments
from trials.optim.master_weights import dense_parameters
from trials.planner.zero.buckets import zero_buckets
from trials.storage.weights_file import Weights


class Group(NamedTuple):
    """The ranks that share the state, as seen from one of them."""

    process_group: dist.ProcessGroup | None
    """None for one rank, which sends nothing."""
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Group:
        """Returns the ranks of a process group, of which one by itself needs none."""
        if process_group is None or dist.get_world_size(process_group) == 1:
            return cls(None, 0, 1)
        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))


class Bucket:
    """Weights that lie one after another in one tensor, of which each rank owns an equal part."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        group: Group,
        *,
        where: torch.device | None = None,
        masters_on_host: bool = False,
    ) -> None:
        """Takes parameters over, which become views of the bucket.

        Args:
            parameters: the parameters, in fp32.
            dtype: the precision that the model computes in.
            group: the ranks that share the bucket.
            where: the device that the model computes on; by default the one that the parameters are on.
            masters_on_host: whether the own part's masters are tensors of their own in the host's memory.
        """
        self.parameters = parameters
        self.length = sum(p.numel() for p in parameters)
        part = -(-self.length // group.size)
        self.begin = min(group.rank * part, self.length)
        """Where the own part begins."""
        self.owned = min(part, self.length - self.begin)
        """Number of weights in the own part; what is left of the part pads the bucket."""
        here = slice(group.rank * part, (group.rank + 1) * part)
        with on_host() if masters_on_host else nullcontext():
            whole = torch.zeros(group.size * part, device=parameters[0].device)
            torch._foreach_copy_(self.views(whole), [p.detach() for p in parameters])
            on_the_host = whole[here].to("cpu", copy=True) if masters_on_host else None
        self.weights = whole.to(where or whole.device, dtype, copy=masters_on_host)
        """What the model computes with."""
        self.own = self.weights[here]
        self.computes_with_masters = dtype is torch.float32 and not masters_on_host
        """Whether the own part's masters are the weights that the model computes with."""
        if on_the_host is not None:
            self.master = nn.Parameter(on_the_host)
        else:
            self.master = nn.Parameter(self.own if self.computes_with_masters else whole[here].clone())
        """The fp32 weights of the own part, which the optimizer updates."""
        self.missing = len(parameters)
        """Number of parameters whose gradient backward has not made yet."""
        self.gradients: Tensor | None = None
        """Whole gradients, where they stay (stage 1)."""
        for parameter, view in zip(parameters, self.views(self.weights), strict=True):
            parameter.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the parameters' parts of a tensor that is as long as the bucket, or longer."""
        pieces = torch.split(flat[: self.length], [p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def keep_gradients(self) -> None:
        """Gives gradients their places, in which backward adds them up."""
        self.gradients = torch.zeros_like(self.weights)
        for parameter, view in zip(self.parameters, self.views(self.gradients), strict=True):
            parameter.grad = view

    def forget_gradients(self) -> None:
        """Sets gradients that stay to zero."""
        if self.gradients is not None:
            self.gradients.zero_()

    @torch.no_grad()
    def to_send(self, dtype: torch.dtype) -> Tensor:
        """Returns the bucket's gradients, padded to equal parts; they are dropped where they do not stay."""
        if self.gradients is not None:
            return self.gradients.to(dtype)
        sent = self.weights.new_empty(len(self.weights), dtype=dtype)
        sent[self.length :].zero_()
        torch._foreach_copy_(self.views(sent), [_gradient(p) for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        return sent

    def gathered_masters(self, group: Group) -> Tensor | None:
        """Returns the bucket's fp32 weights on the first rank, None on others; a collective unless the model
        computes with masters."""
        if self.computes_with_masters:
            return self.weights if group.rank == 0 else None
        if group.process_group is None:
            return self.master.detach()
        master = self.master.detach().to(self.weights.device)
        whole = self.weights.new_empty(len(self.weights), dtype=torch.float32) if group.rank == 0 else None
        parts = list(torch.split(whole, len(master))) if whole is not None else None
        dist.gather(master, parts, group=group.process_group, group_dst=0)
        return whole


def when_accumulated(parameter: Tensor, run: Callable[[Tensor], None]) -> None:
    """Has `run` called with the parameter each time backward has made or added to its gradient."""
    parameter.register_post_accumulate_grad_hook(run)  # type: ignore[no-untyped-call]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def bucket_parameters(model: nn.Module, itemsize: int, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Returns the dense parameters of each bucket, first bucket first.

    Args:
        model: the model, whose tables were taken.
        itemsize: bytes of a gradient.
        bucket_bytes: bytes of gradients from which on a bucket is full; with 0 each layer is a bucket.
    """
    units = _units(dense_parameters(model))
    sizes = [itemsize * sum(p.numel() for p in unit) for unit in units]
    return [[p for index in joined for p in units[index]] for joined in zero_buckets(sizes, bucket_bytes)]


def whole_weights(model: nn.Module, names: Iterable[str], buckets: Sequence[Bucket], group: Group) -> Weights:
    """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective.

    `names` are those of the dense parameters, in the buckets' order.
    """
    masters: dict[str, Tensor] = {}
    names = iter(names)
    for bucket in buckets:
        gathered = bucket.gathered_masters(group)
        if gathered is not None:
            views = bucket.views(gathered)
            masters |= {name: view.to("cpu", copy=True) for view, name in zip(views, names, strict=False)}
    if not masters:
        return {}
    state = model.state_dict()
    return {name: masters[name] if name in masters else t.to("cpu", copy=True) for name, t in state.items()}


def own_state(buckets: Sequence[Bucket], optimizer: Optimizer) -> dict[str, FlatPieces]:
    """Returns the own parts of weights and moments, to save or to load into."""
    starts = list(accumulate((bucket.length for bucket in buckets), initial=0))
    pieces: dict[str, list[Piece]] = {"weight": [], **{moment: [] for moment in MOMENTS}}
    for start, bucket in zip(starts, buckets, strict=False):
        own = {"weight": bucket.master.detach(), **moments(optimizer, bucket.master)}
        for name, values in own.items():
            if bucket.owned:  # without what pads a bucket to equal parts
                pieces[name].append(Piece(start + bucket.begin, values[: bucket.owned]))
    return {name: FlatPieces(starts[-1], tuple(own_pieces)) for name, own_pieces in pieces.items()}


@torch.no_grad()
def hand_out(buckets: Sequence[Bucket], group: Group) -> None:
    """Gives every rank the weights of all buckets, of which each owner has put its part in place."""
    if group.process_group is None:
        return
    works = [
        dist.all_gather_single(bucket.weights, bucket.own, group=group.process_group, async_op=True)
        for bucket in buckets
    ]
    for work in works:
        assert work is not None
        work.wait()


def _units(parameters: dict[str, nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters of what stands before the layers, of each layer, and of what stands above them."""

    def unit(item: tuple[str, nn.Parameter]) -> str:
        first, second, *_ = (*item[0].split("."), "")
        return f"layer{second}" if first == "layers" else "features" if first == "features" else "head"

    return [[parameter for _, parameter in items] for _, items in groupby(parameters.items(), key=unit)]
