"""What one rank of a pipeline holds: its stages' weights, gradients and optimizer state.

Ranks are a mesh of stages x data x tensor (`trials.training.distributed.tensor_parallel`): those of one stage
hold the same layers, as dp or zero1 do without pipelines, or the same parts of them. A tensor rank sends to
its like in the next stage: what modules put out each has whole.

Stages average their gradients over data ranks when the last micro-batch has gone backward, all at once: a
schedule's passes for weights alone call none of autograd's hooks, on which reductions behind backward rest.

Shapes: B examples, K numeric inputs, N numbers with buckets; M embeddings of length D between two stages, for
each of N rows in `x_NMD`: an example's, or those of its members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dhen.config import DhenConfig
from dhen.dhen_model import DhenModel
from trials.optim.adamw import DTYPES, Clip, dense_parameters
from trials.planner.pipeline import stages_of
from trials.records.job import TrainingConfig
from trials.records.strategy import RECOMPUTED, Strategy
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.ddp import DDPEngine
from trials.training.distributed.engine import DenseInputs, Engine
from trials.training.distributed.tensor_parallel import DATA, STAGES
from trials.training.distributed.zero import Zero
from trials.training.memory_limit import on_device_for_good

# One stage of a pipeline: some of a DHEN's layers, with features below the first and heads above the last.
#
# What a stage needs beside the embeddings that reach it is there before the schedule begins: all ranks of a
# pipeline read the same examples, so that raw numeric inputs and labels need not be sent, and the looked-up
# embeddings are leaves, whose gradients stay with them however the schedule cuts backward into passes.
#
# Shapes: N rows that reach a stage (B examples, or B K of K members), M embeddings, D their dimension.


class PipelineStage(nn.Module):
    """(x_NMD of the stage before, number of a micro-batch) -> y_NM'D for the next stage, or the heads' answer.

    The first stage takes no notice of x. The modules are the model's own.
    """

    def __init__(
        self, model: DhenModel, layers: range, micro_batches: Sequence[DenseInputs], dtype: torch.dtype
    ) -> None:
        """Takes the layers of a model that `keep_layers` has cut; `micro_batches` will be those of the running
        step, `dtype` is what it computes in."""
        super().__init__()
        self._micro_batches, self._dtype = micro_batches, dtype
        of_model = list(model.layers.named_children())
        self.layers = nn.ModuleList(layer for name, layer in of_model if int(name) in layers)
        self.features = model.features if layers.start == 0 else None
        heads = getattr(model, "head", None) if layers.stop == layer_count(model) else None
        self.heads = nn.ModuleList([model.head, model.logit]) if heads is not None else None
        self._answer = model.answer

    def forward(self, x: Tensor, *, number: Tensor) -> Tensor:
        """The stage's part of the model on one micro-batch."""
        return self.run(x, self._micro_batches[int(number)])

    def run(self, x: Tensor, inputs: DenseInputs) -> Tensor:
        """As `forward`, on inputs that are given."""
        if self.features is not None:
            x = self.features(inputs, self._dtype)
        elif torch.is_grad_enabled():
            x = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call]
        raw_BK = inputs.numeric_BK.to(self._dtype)
        for layer in self.layers:
            x = layer(x, raw_BK)
        if self.heads is not None:
            return self._answer(x)
        # what is sent lies in one piece; torch's schedules detach it in place, which a view refuses
        y = x.contiguous()
        return y if y._base is None else y.clone()


class _ContiguousGradient(torch.autograd.Function):
    """The same tensor, whose gradient lies in one piece, as what is sent has to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def keep_layers(model: DhenModel, stages: Sequence[range]) -> None:
    """Takes all but these layers out of the model, and what lies below the first and above the last if those
    are not among them. What stays keeps its names."""
    kept = {index for layers in stages for index in layers}
    count = len(model.layers)
    layers = {str(index): layer for index, layer in enumerate(model.layers) if index in kept}
    model.layers = nn.ModuleDict(layers)  # type: ignore[assignment]
    model.layer_count = count  # type: ignore[assignment]
    if 0 not in kept:
        model.features = None  # type: ignore[assignment]
    if count - 1 not in kept:
        model.head = model.logit = None  # type: ignore[assignment]


def layer_count(model: nn.Module) -> int:
    """Returns the number of layers that a model had before it was cut."""
    count = getattr(model, "layer_count", None)
    return count if isinstance(count, int) else len(model.layers)  # type: ignore[arg-type]


def boundary(config: DhenConfig, layer: int, examples: int) -> tuple[int, int, int]:
    """Returns the shape (N, M, D) of what a layer puts out for so many examples."""
    parted = config.members > 1 and layer >= config.members_from
    rows = examples * (config.members if parted else 1)
    return rows, config.layers[layer].embeddings, config.embedding_dim


class PipelineEngine(Engine):
    """The engine of one rank's stages."""

    def __init__(
        self,
        model: DhenModel,
        architecture: DhenConfig,
        strategy: Strategy,
        config: TrainingConfig,
        mesh: DeviceMesh,
        layers_per_stage: Sequence[int],
        micro_batch: int,
        where: torch.device,
        bucket_bytes: int,
    ) -> None:
        """Takes the stages of this rank out of the model, which is alike on all ranks, and frees the rest.

        Args:
            model: the model without its tables, in fp32 in the host's memory; of split modules this rank's parts.
            architecture: what it was built from.
            strategy: how it is held.
            config: resolved settings of AdamW and precision.
            mesh: the ranks, from `trials.training.distributed.tensor_parallel.model_mesh`.
            layers_per_stage: the number of layers of each stage.
            micro_batch: number of examples of a micro-batch.
            where: the device to which the stages go.
            bucket_bytes: bytes of gradients that zero1 reduces at a time.
        """
        assert config.precision != "auto"
        self._data, self.group = mesh.get_group(DATA), mesh.get_group(STAGES)
        self.ranks, self._rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        every = stages_of(layers_per_stage)
        self.ends = [layers.stop for layers in every]
        """One past the last layer of each stage of the model."""
        self.architecture, self.dtype, self.where = architecture, DTYPES[config.precision], where
        self.micro_batch, self.micro_batches = micro_batch, list[DenseInputs]()
        whole = {name: p.numel() for name, p in dense_parameters(model).items()}
        begins = dict(zip(whole, accumulate(whole.values(), initial=0), strict=False))
        self._length = sum(whole.values())
        self._saved = [_saved_of(model, every[rank :: self.ranks]) for rank in range(self.ranks)]
        held = every[self._rank :: self.ranks]
        keep_layers(model, held)
        on_device_for_good(model, where)
        data_ranks = dist.get_world_size(self._data)
        self._own: DDPEngine | Zero
        if strategy.dense == "zero1":
            self._own = Zero(model, config, self._data, keeps_gradients=True, bucket_bytes=bucket_bytes)
            self._own.accumulate_only(True)
        else:
            self._own = _DDPStage(model, config, self._data if data_ranks > 1 else None)
        if self.is_zero:  # each tensor rank of a stage has the sum over all of them
            self.clip = Clip(config.clip_norm, dist.group.WORLD, copies=strategy.tensor)
        else:
            self.clip = Clip(config.clip_norm, self.group)
        self._own.clip = self.clip
        self.optimizer: Optimizer = self._own.optimizer
        self._moves = _joined([(begins[name], p.numel()) for name, p in dense_parameters(model).items()])
        self.module: nn.Module = model
        self.checkpointing = strategy.checkpointing
        """Which of the model's layers were asked to be recomputed."""
        layers_held: Any = model.layers
        for index in range(sum(layers_per_stage))[RECOMPUTED[strategy.checkpointing]]:
            if str(index) in layers_held:
                layers_held[str(index)] = checkpoint_wrapper(layers_held[str(index)])
        self.stages = {
            every.index(layers): PipelineStage(model, layers, self.micro_batches, self.dtype)
            for layers in held
        }
        """This rank's stages, by their places in the model, in order."""

    @property
    def is_zero(self) -> bool:
        """Whether the ranks of a stage share its optimizer's state."""
        return isinstance(self._own, Zero)

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage."""
        return self._rank == 0

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return len(self.ends) - 1 in self.stages

    @torch.no_grad()
    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B on ranks of the first stage, none on others; a collective of the pipeline.

        No more rows at a time than a micro-batch has are in a stage."""
        size, on_their_way = len(inputs.numeric_BK), []
        starts = range(0, size, self.micro_batch)
        answers: list[Tensor] = []
        for stage, module in self.stages.items():
            for start in starts:
                part = inputs.part(slice(start, min(start + self.micro_batch, size)))
                x = part.numeric_BK
                if stage:
                    shape = boundary(self.architecture, self.ends[stage - 1] - 1, len(x))
                    x = torch.empty(shape, dtype=self.dtype, device=self.where)
                    dist.recv(x, group=self.group, group_src=(stage - 1) % self.ranks)
                y = module.run(x, part)
                if stage == len(self.ends) - 1:
                    answers.append(y)
                else:
                    to = (stage + 1) % self.ranks
                    work = dist.isend(y, group=self.group, group_dst=to)
                    on_their_way.append((work, y))
        logit_B = torch.cat(answers).float() if answers else torch.empty(size, device=self.where)
        if self.first:
            dist.recv(logit_B, group=self.group, group_src=self.ranks - 1)
        elif self.has_last:
            dist.send(logit_B, group=self.group, group_dst=0)
        for work, _ in on_their_way:
            assert work is not None
            work.wait()
        return logit_B if self.first else logit_B[:0]

    def update(self) -> None:
        """Averages the gradients of this rank's stages over data ranks, and updates the weights."""
        if isinstance(self._own, Zero):
            self._own.reduce_all()
        self._own.update()

    def is_finite(self) -> bool:
        """Tells whether no weight that this rank updates is NaN or infinite."""
        return self._own.is_finite()

    def weights(self) -> Weights:
        """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective."""
        mine = self._own.weights()
        if not mine:  # another rank of the stage has them
            return {}
        if self._rank:
            for tensor in mine.values():
                dist.send(tensor.to(self.where), group=self.group, group_dst=0)
            return {}
        for rank, saved in enumerate(self._saved[1:], start=1):
            for name, (shape, dtype) in saved.items():
                buffer = torch.empty(shape, dtype=dtype, device=self.where)
                dist.recv(buffer, group=self.group, group_src=rank)
                mine[name] = buffer.to("cpu", copy=True)
        return mine

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns weights and moments of this rank, as ranges of vectors over the whole model."""
        state = {}
        for name, own in self._own.state(saved).items():
            pieces = (
                Piece(begin, values[first - start : last - start])
                for start, values in own.pieces
                for begin, first, last in self._moved(start, start + len(values))
            )
            state[name] = FlatPieces(self._length, tuple(pieces))
        return state

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """Returns where the gradients that are clipped lie in the whole model's vector."""
        return [
            [
                (begin, begin + last - first)
                for start, stop in ranges
                for begin, first, last in self._moved(start, stop)
            ]
            for ranges in self._own.clipped_ranges()
        ]

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`."""
        self._own.restored(steps)

    def _moved(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields for numbers `start` to `stop` of this rank's vector each run that lies together in the whole
        model's: where it begins there, and its range here."""
        here = 0
        for begin, count in self._moves:
            first, last = max(start, here), min(stop, here + count)
            if first < last:
                yield begin + first - here, first, last
            here += count


class _DDPStage(DDPEngine):
    """The engine of dp for one rank's stages, whose gradients are averaged over data ranks as one vector."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(model, Strategy(), config)
        assert config.precision != "auto"
        self._group, self._sent_in = process_group, DTYPES[config.reduction_precision(config.precision)]

    def average_whole(self) -> None:
        """Averages the gradients over data ranks; a collective."""
        gradient = self._master.flat.grad
        if self._group is None or gradient is None:
            return
        sent = gradient.div_(dist.get_world_size(self._group)).to(self._sent_in)
        dist.all_reduce(sent, group=self._group)
        if sent is not gradient:
            gradient.copy_(sent)

    def weights(self) -> Weights:
        """Returns a copy of the stages' weights on one of the data ranks."""
        if self._group is not None and dist.get_rank(self._group):
            return {}
        return super().weights()


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges (begin, length) with those that follow one another made one."""
    found: list[tuple[int, int]] = []
    for begin, length in ranges:
        if found and sum(found[-1]) == begin:
            found[-1] = found[-1][0], found[-1][1] + length
        else:
            found.append((begin, length))
    return found


def _saved_of(model: DhenModel, stages: Sequence[range]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns shape and type of what these stages have of the model's `state_dict`, by name in its order."""
    held = {index for layers in stages for index in layers}

    def is_held(name: str) -> bool:
        first, second, *_ = (*name.split("."), "")
        if first == "layers":
            return int(second) in held
        return (0 if first == "features" else len(model.layers) - 1) in held

    # all that is sent is fp32 but for what is no number
    state = model.state_dict().items()
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state if is_held(name)}
