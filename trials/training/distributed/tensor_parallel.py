"""Tensor parallelism: a model whose wide modules are split over groups of ranks, each of which sees one and the
same part of the batch (Megatron-LM, arXiv 1909.08053).

What is split, and how, modules say themselves (`dhen.ops.split`); here are the ranks. Ranks r t to r t + t - 1
are a tensor group of t, in one host if t divides its ranks; ranks with one place in all groups hold the same
parts, and train them by data parallelism (`model_mesh`). Each engine of data parallelism, and that of a pipeline's
stages, takes what is left of a rank's model, and `WeightLayout` puts whole weights together and knows where a
rank's numbers lie among all.

Tables know nothing of it: every rank looks up the examples of its own slice, as in data parallelism over all
ranks, and the ranks of a group then gather what they looked up. So no row is looked up twice, and no gradient of
a row is sent twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dhen.ops.split import ParameterSplit, split_parameters
from trials.optim.adamw import dense_parameters
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import DenseBatch, DenseInputs, Engine

STAGES, DATA, TENSOR = "pipeline", "data", "tensor"
"""Names of the mesh's dimensions."""


def model_mesh(world: int, tensor: int, device_type: str, pipeline: int = 1) -> DeviceMesh:
    """Returns all ranks as stages x data ranks x tensor ranks; a collective.

    Tensor ranks are neighbours, so that a host has a group; stages are as far apart as can be, so that what they
    send crosses the network, where it is least; data ranks are between, in a host if groups leave room.
    """
    degrees = pipeline, world // (pipeline * tensor), tensor
    return init_device_mesh(device_type, degrees, mesh_dim_names=(STAGES, DATA, TENSOR))


class TensorGroup:
    """The ranks that share a part of the batch and split modules among them."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def sum_(self, x: Tensor) -> None:
        """Replaces x by the sum of all ranks' x, which is the same on all to the bit."""
        dist.all_reduce(x, group=self.process_group)

    def gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x, which have one shape, stacked."""
        stacked = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(stacked.unbind()), x, group=self.process_group)
        return stacked

    def to_first(self, x: Tensor) -> list[Tensor] | None:
        """Returns all ranks' x on the first rank of the group, None on others."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, group=self.process_group, group_dst=0)
        return parts


class GroupBatch:
    """A rank's examples and those of the others of its tensor group, one after another: what all of them compute
    with."""

    def __init__(self, group: TensorGroup, examples: int, where: torch.device) -> None:
        """Asks how many examples each rank has; a collective."""
        self._group = group
        counts = group.gather(torch.tensor([examples], device=where)).flatten().tolist()
        self._counts, self._longest = counts, max(counts)
        start = sum(counts[: group.rank])
        self._own = slice(start, start + examples)

    def batch(self, batch: DenseBatch) -> DenseBatch:
        """Returns the group's batch, with leaves of its own."""
        (embeddings, numeric_BK, share_BN), label_B, weight_B = batch
        weight_B1 = None if weight_B is None else weight_B.unsqueeze(1)
        numbers, shares, label_B1, weights = self._together(
            numeric_BK, share_BN, label_B.unsqueeze(1), weight_B1
        )
        assert numbers is not None
        assert label_B1 is not None
        return DenseBatch(
            DenseInputs(tuple(self._all(e.detach()).requires_grad_() for e in embeddings), numbers, shares),
            label_B1.squeeze(1),
            None if weights is None else weights.squeeze(1),
        )

    def inputs(self, inputs: DenseInputs) -> DenseInputs:
        """Returns the group's inputs, without gradients."""
        numeric_BK, share_BN = self._together(inputs.numeric_BK, inputs.share_BN)
        assert numeric_BK is not None
        return DenseInputs(tuple(map(self._all, inputs.embeddings)), numeric_BK, share_BN)

    def own(self, whole: Tensor) -> Tensor:
        """Returns this rank's examples of the group's."""
        return whole[self._own]

    def pass_on_gradients(self, shared: DenseBatch, batch: DenseBatch) -> None:
        """Gives this rank's embeddings their gradients, which every rank of the group has for all.

        The tables average over all ranks what is summed over groups alone.
        """
        for whole, leaf in zip(shared.inputs.embeddings, batch.inputs.embeddings, strict=True):
            assert whole.grad is not None
            leaf.grad = self.own(whole.grad) * self._group.size

    def _all(self, x_B: Tensor) -> Tensor:
        """Returns the examples of all ranks in their order."""
        if (missing := self._longest - len(x_B)) > 0:
            x_B = torch.cat((x_B, x_B.new_zeros(missing, *x_B.shape[1:])))
        stacked = self._group.gather(x_B.contiguous())
        if min(self._counts) == self._longest:
            return stacked.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(stacked, self._counts, strict=True)])

    def _together(self, *columns: Tensor | None) -> Iterator[Tensor | None]:
        """Yields the group's columns, gathered at once: they are few numbers each."""
        there = [column for column in columns if column is not None]
        parts = torch.split(self._all(torch.cat(there, dim=1)), [column.shape[1] for column in there], dim=1)
        found = iter(parts)
        for column in columns:
            yield None if column is None else next(found).contiguous()


class _Held(NamedTuple):
    """A parameter as it lies in the vector of all dense weights of this rank, and of the whole model."""

    start: int
    """Where its numbers begin on this rank."""
    length: int
    whole_start: int
    split: ParameterSplit | None
    whole_shape: tuple[int, ...]


class WeightLayout:
    """Where the dense weights that a rank of a tensor group holds lie among those of the whole model."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        """Takes a model of which this rank's parts were kept, before an engine takes its parameters."""
        self.group, self._splits = group, split_parameters(model)
        held, start, whole_start = [], 0, 0
        for name, parameter in dense_parameters(model).items():
            split, shape = self._splits.get(name), list(parameter.shape)
            if split is not None:
                shape[split.dim] *= group.size
            held.append(_Held(start, parameter.numel(), whole_start, split, tuple(shape)))
            start += parameter.numel()
            whole_start += prod(shape)
        self._held, self._length = held, whole_start

    def clip_over_group(self, engine: Engine) -> None:
        """Has the engine of this rank's part clip gradients by their norm over the group."""
        engine.clip.over(self.group.process_group, [*map(self._replicated, engine.clipped_ranges())])

    def whole_weights(self, own: Weights, where: torch.device) -> Weights:
        """Returns the whole of all weights on the first rank of the group, empty on others, from the parts that an
        engine has; a collective on the device that computes."""
        if not own:  # of data ranks the first alone has them
            return {}
        for name, split in self._splits.items():
            parts = self.group.to_first(own[name].to(where))
            if parts is not None:
                own[name] = split.joined(parts).to("cpu")
        return own if self.group.rank == 0 else {}

    def whole_state(self, own: dict[str, FlatPieces]) -> dict[str, FlatPieces]:
        """Returns what this rank holds, where it lies in the whole model's vectors: a checkpoint of one degree is
        read under any other, and without one."""
        return {
            name: FlatPieces(
                self._length, tuple(piece for each in one.pieces for piece in self._pieces(each))
            )
            for name, one in own.items()
        }

    def _replicated(self, ranges: Iterable[tuple[int, int]]) -> list[slice]:
        """Returns where, among the numbers of these ranges (start, stop) one after another, those lie that all
        ranks of the group have alike."""
        found, before = [], 0
        for start, stop in ranges:
            overlaps = (
                (max(one.start, start), min(one.start + one.length, stop))
                for one in self._held
                if one.split is None
            )
            moved = before - start
            found += [slice(begin + moved, end + moved) for begin, end in overlaps if begin < end]
            before += stop - start
        return found

    def _pieces(self, piece: Piece) -> Iterator[Piece]:
        """Yields the ranges of the whole model's vector that a range of this rank's consists of."""
        stop = piece.start + len(piece.values)
        for one in self._held:
            begin, end = max(one.start, piece.start), min(one.start + one.length, stop)
            if begin >= end:
                continue
            values = piece.values[begin - piece.start : end - piece.start]
            for offset, first, last in self._runs(one, begin - one.start, end - one.start):
                yield Piece(one.whole_start + offset, values[first:last])

    def _runs(self, one: _Held, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields for numbers `begin` to `end` of a parameter each run that lies together in the whole one: where
        it lies there, and its range among these numbers."""
        if one.split is None:
            yield begin, 0, end - begin
            return
        _, length, apart = one.split.runs(one.whole_shape, self.group.size)
        first = begin
        while begin < end:
            number, inside = divmod(begin, length)
            count = min(length - inside, end - begin)
            yield number * apart + self.group.rank * length + inside, begin - first, begin - first + count
            begin += count
