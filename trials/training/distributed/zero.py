"""ZeRO, stages 1 and 2 (arXiv 1910.02054): weights on every rank, optimizer state and gradients on their owners.

Weights lie in buckets. Every rank owns an equal part of each: it alone has AdamW's moments of the part, and its
fp32 master weights. Behind backward a bucket's gradients are averaged and scattered to the owners of its parts,
each owner updates its part, and an all-gather hands out what the model computes with. That sends as much as
plain data parallelism, whose all-reduce is a reduce-scatter and an all-gather.

Stage 1 (zero1) has gradients of all weights on every rank, in buckets as large as those of
DistributedDataParallel, adds micro-batches up there, and reduces in the last one. Stage 2 (zero2) has a bucket
for each layer, reduces in every micro-batch, and frees whole gradients once a bucket is on its way: what stays
is the fp32 gradient of the own part.

In fp32 master weights need no memory: a rank's masters are its part of the weights that the model computes
with. In bf16 they are fp32 tensors of their own, as long as the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trials.optim.adamw import DTYPES, MOMENTS, Clip, adamw, all_finite, dense_parameters, moments, set_steps
from trials.planner.zero_memory import zero_buckets
from trials.records.job import TrainingConfig
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import Engine
from trials.training.memory_limit import on_host

# Buckets: weights that lie one after another in one tensor, of which each rank owns an equal part.
#
# ZeRO's stages 1 and 2 and ZeRO-Offload
# (`trials.training.distributed.zero_offload`) hold a model in them. The own part has fp32 master weights, which
# the rank's optimizer updates. If the model computes in fp32 on the device of the masters, these need no
# memory: they are the part of the weights itself. Else they are tensors of their own, as long as the part.


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
        """Whole gradients, if they stay (stage 1)."""
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
        """Returns the bucket's gradients, padded to equal parts; they are dropped if they do not stay."""
        if self.gradients is not None:
            return self.gradients.to(dtype)
        sent = self.weights.new_empty(len(self.weights), dtype=dtype)
        sent[self.length :].zero_()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_copy_(self.views(sent), gradients)
        del gradients
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


def bucket_parameters(model: nn.Module, itemsize: int, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Returns the dense parameters of each bucket, first bucket first.

    Args:
        model: the model, whose tables were taken.
        itemsize: bytes of a gradient.
        bucket_bytes: bytes of gradients from which on a bucket is full; with 0 each layer is a bucket.
    """

    def unit(item: tuple[str, nn.Parameter]) -> str:
        """What stands before the layers, each layer, and what stands above them."""
        first, second, *_ = (*item[0].split("."), "")
        return f"layer{second}" if first == "layers" else "features" if first == "features" else "head"

    units = [[p for _, p in items] for _, items in groupby(dense_parameters(model).items(), key=unit)]
    sizes = [itemsize * sum(p.numel() for p in unit) for unit in units]
    return [[p for index in joined for p in units[index]] for joined in zero_buckets(sizes, bucket_bytes)]


class Zero(Engine):
    """The engine of zero1 and zero2.

    Hooks count the gradients of a bucket. When the last one has come, the bucket is averaged and scattered while
    backward goes on, and what arrives of the own part is taken. No more than one bucket is on its way.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        process_group: dist.ProcessGroup | None,
        *,
        keeps_gradients: bool,
        bucket_bytes: int,
        where: torch.device | None = None,
        masters_on_host: bool = False,
    ) -> None:
        """Takes the weights of a model over, which is alike on all ranks.

        Args:
            model: its parameters become views of buckets.
            config: resolved settings of AdamW and precision.
            process_group: the ranks that share the state; None for one rank.
            keeps_gradients: True for stage 1, False for stage 2.
            bucket_bytes: bytes of gradients that stage 1 reduces at a time, at least.
            where: as `Bucket` takes it.
            masters_on_host: as `Bucket` takes it.
        """
        assert config.precision != "auto"
        self.module, self._keeps_gradients = model, keeps_gradients
        self._group, self._names = Group.of(process_group), tuple(dense_parameters(model))
        dtype = DTYPES[config.precision]
        smallest = bucket_bytes if keeps_gradients else 0
        self.buckets = [
            Bucket(parameters, dtype, self._group, where=where, masters_on_host=masters_on_host)
            for parameters in bucket_parameters(model, dtype.itemsize, smallest)
        ]
        if keeps_gradients:
            for bucket in self.buckets:
                bucket.keep_gradients()
        self._sent_in = DTYPES[config.reduction_precision(config.precision)]
        self._waits = False
        """Whether gradients stay where they are, because another micro-batch follows."""
        self._on_its_way: tuple[Bucket, Tensor, Tensor, dist.Work] | None = None
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                when_accumulated(parameter, partial(self._arrived, bucket))
        self._updating: Optimizer = adamw([bucket.master for bucket in self.buckets], config)
        """What holds the moments."""
        self.optimizer = self._updating
        self.clip = Clip(config.clip_norm, self._group.process_group)

    def accumulate_only(self, yes: bool) -> None:
        """Sets whether another micro-batch follows, for which stage 1 waits."""
        self._waits = yes and self._keeps_gradients

    def reduce_all(self) -> None:
        """Reduces the gradients of stage 1, which have waited (`accumulate_only`), all at once, the last bucket of
        the model first."""
        assert self._keeps_gradients
        for bucket in reversed(self.buckets):
            self._send(bucket)

    def update(self) -> None:
        """Updates the own parts, once the last bucket has been reduced, and hands them out."""
        self._settle()
        assert all(bucket.missing == len(bucket.parameters) for bucket in self.buckets)
        self.clip(bucket.master.grad for bucket in self.buckets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.forget_gradients()
        self._hand_out()

    def is_finite(self) -> bool:
        """Tells whether no weight of the own parts is NaN or infinite."""
        return all(all_finite(bucket.master) for bucket in self.buckets)

    def weights(self) -> Weights:
        """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective."""
        masters: dict[str, Tensor] = {}
        names = iter(self._names)
        for bucket in self.buckets:
            gathered = bucket.gathered_masters(self._group)
            if gathered is not None:
                views = bucket.views(gathered)
                masters |= {name: view.to("cpu", copy=True) for view, name in zip(views, names, strict=False)}
        if not masters:
            return {}
        state = self.module.state_dict().items()
        return {name: masters[name] if name in masters else t.to("cpu", copy=True) for name, t in state}

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the own parts of weights and moments, to save or to load into (`restored`)."""
        length = sum(bucket.length for bucket in self.buckets)
        pieces: dict[str, list[Piece]] = {"weight": [], **{moment: [] for moment in MOMENTS}}
        for bucket, ((start, stop),) in zip(self.buckets, self.clipped_ranges(), strict=True):
            own = {"weight": bucket.master.detach(), **moments(self._updating, bucket.master)}
            for name, values in own.items():
                if start < stop:  # without what pads a bucket to equal parts
                    pieces[name].append(Piece(start, values[: stop - start]))
        return {name: FlatPieces(length, tuple(own_pieces)) for name, own_pieces in pieces.items()}

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """Returns where the own part of each bucket lies in the vector of all weights, one range each."""
        starts = accumulate((bucket.length for bucket in self.buckets), initial=0)
        owned = zip(starts, self.buckets, strict=False)
        return [[(start + b.begin, start + b.begin + b.owned)] for start, b in owned]

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, and hands the weights out; a collective."""
        for bucket in self.buckets:
            set_steps(self._updating, bucket.master, steps)
        self._hand_out()

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Gives every rank the weights that their owners have updated."""
        for bucket in self.buckets:
            if not bucket.computes_with_masters:
                bucket.own.copy_(bucket.master)
        self._gather()

    def _gather(self) -> None:
        """Gives every rank the weights of all buckets, of which each owner has put its part in place."""
        if self._group.process_group is None:
            return
        works = [
            dist.all_gather_single(bucket.weights, bucket.own, group=self._group.process_group, async_op=True)
            for bucket in self.buckets
        ]
        for work in works:
            assert work is not None
            work.wait()

    def _arrived(self, bucket: Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        if bucket.missing:
            return
        bucket.missing = len(bucket.parameters)
        if not self._waits:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Begins to reduce a bucket's gradients, once those of the bucket before have been reduced: no more than
        one bucket of whole gradients is on its way."""
        self._settle()
        sent = bucket.to_send(self._sent_in)
        if self._group.process_group is None:  # one rank owns all of it
            with torch.no_grad():
                return self._take(bucket, sent)
        part = sent.new_empty(len(bucket.master))
        work = dist.reduce_scatter_single(
            part, sent, op=dist.ReduceOp.AVG, group=self._group.process_group, async_op=True
        )
        assert work is not None
        self._on_its_way = bucket, sent, part, work

    def _settle(self) -> None:
        """Waits for the bucket that is on its way, and takes its part."""
        if self._on_its_way is None:
            return
        bucket, sent, part, work = self._on_its_way
        self._on_its_way = None
        work.wait()
        del sent, work  # gloo's work has a copy of what was sent
        with torch.no_grad():
            self._take(bucket, part)

    def _take(self, bucket: Bucket, part: Tensor) -> None:
        """Adds what has arrived of a bucket to the own part's gradient; in a micro-batch each bucket comes once,
        the last one of the model first."""
        gradient = bucket.master.grad
        bucket.master.grad = part.float() if gradient is None else gradient.add_(part)
