"""Training steps of a DHEN whose layers lie on the ranks of pipelines, by `torch.distributed.pipelining`.

Each pipeline has its part of every batch, and the schedule is torch's. If modules are split, the ranks of a
tensor group go through it side by side. Micro-batches are equally long, as what is
received has its place from the start: they are filled up with examples that count nothing.

Shapes: B examples of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhen.batch import FeatureBatch, Keys
from dhen.config import DhenConfig
from dhen.dhen_model import DhenModel
from dhen.members import cross_entropy
from dhen.ops.linear import running
from trials.planner.collectives import BUCKET_BYTES
from trials.records.job import TrainingConfig
from trials.records.strategy import Ranks, Schedule, Strategy, rank_slice
from trials.training.distributed.engine import DenseBatch, part_of
from trials.training.distributed.parallelize import ParallelStep
from trials.training.distributed.pipeline import PipelineEngine, boundary
from trials.training.distributed.tensor_parallel import (
    TENSOR,
    TensorGroup,
    WeightLayout,
    model_mesh,
)

SCHEDULES: dict[Schedule, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
"""Torch's names of schedules."""


class PipelineStep(ParallelStep):
    """Training steps of the dense part on the ranks of pipelines; every rank makes the same calls."""

    engine: PipelineEngine

    def __init__(self, engine: PipelineEngine, strategy: Strategy, layout: WeightLayout | None) -> None:
        """Takes the engine of this rank's stages, the schedule and the number of micro-batches; `layout` as
        `ParallelStep` takes it."""
        # importing it takes most of a second, which trainings without pipelines do not need
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        super().__init__(engine, strategy.micro_batches, layout)
        self.schedule = strategy.schedule
        self.ranks, self._micro = engine.ranks, engine.micro_batch

        class SplittingStage(PipelineStage):
            """A stage that tells operations of our own which pass runs."""

            def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
                with running(backward_type):
                    return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

        of_torch = [
            SplittingStage(
                module,
                number,
                len(engine.ends),
                engine.where,
                # what reaches the first stage is a number
                input_args=self._leaving(number - 1) if number else torch.zeros(1, dtype=torch.int64),
                output_args=self._leaving(number),
                group=engine.group,
            )
            for number, module in engine.stages.items()
        ]
        kind: Any = get_schedule_class(SCHEDULES[strategy.schedule])
        stages = of_torch if issubclass(kind, PipelineScheduleMulti) else of_torch[0]
        self._schedule = kind(stages, self.micro_batches, loss_fn=_loss, scale_grads=False)

    def forward_backward(self, batch: DenseBatch, weight: float = 1.0) -> Tensor:
        """Runs all micro-batches through the pipeline forward and backward.

        Returns this rank's loss, detached, whose mean over all ranks is that of the batch: those of the last stage
        have it. `weight` multiplies loss and gradients.
        """
        size, micro = len(batch.label_B), self._micro
        full = micro * self.micro_batches
        assert size <= full
        gradients = [e.new_zeros(full, *e.shape[1:]) for e in batch.inputs.embeddings]
        # filled up from the batch's beginning
        rows = torch.arange(full, device=batch.label_B.device) % size
        parts = [
            part_of(
                batch, slice(start, start + micro) if start + micro <= size else rows[start : start + micro]
            )
            for start in range(0, full, micro)
        ]
        for number, part in enumerate(parts):
            here = slice(number * micro, (number + 1) * micro)
            for leaf, gradient in zip(part.inputs.embeddings, gradients, strict=True):
                leaf.grad = gradient[here]  # where backward adds it up
        self.engine.micro_batches[:] = [part.inputs for part in parts]
        # the label of each example, and what its loss is multiplied by (B x 2)
        counted = [torch.ones_like(p.label_B) if p.weight_B is None else p.weight_B for p in parts]
        columns = torch.cat([p.label_B for p in parts]), torch.cat(counted) * (weight / size)
        target = torch.stack(columns, dim=1)
        target[size:, 1] = 0.0  # of examples that fill up
        losses: list[Tensor] = []
        numbers = torch.arange(self.micro_batches)
        self._schedule.step(
            *((numbers,) if self.engine.first else ()),
            number=numbers,
            target=target if self.engine.has_last else None,
            losses=losses if self.engine.has_last else None,
            return_outputs=False,
        )
        self.engine.micro_batches.clear()
        for leaf, gradient in zip(batch.inputs.embeddings, gradients, strict=True):
            leaf.grad = gradient[:size]
        if not losses:
            return torch.zeros((), device=self.engine.where)
        return self.ranks * torch.stack([loss.detach() for loss in losses]).sum()

    def _leaving(self, stage: int) -> Tensor:
        """Returns a tensor without memory that is like what a stage puts out in training."""
        model, ends = self.engine.architecture, self.engine.ends
        of_heads = (self._micro,) if model.members == 1 else (self._micro, model.members)
        last = stage == len(ends) - 1
        shape = of_heads if last else boundary(model, ends[stage] - 1, self._micro)
        return torch.empty(shape, dtype=self.engine.dtype, device="meta", requires_grad=True)


def pipelined(
    model: nn.Module,
    strategy: Strategy,
    config: TrainingConfig,
    architecture: DhenConfig,
    layers_per_stage: Sequence[int],
    ranks: Ranks,
    *,
    where: torch.device,
    bucket_bytes: int = BUCKET_BYTES,
) -> PipelineStep:
    """Takes a model over whose tables were taken, in fp32 in the host's memory, alike on all ranks; a collective.

    Args:
        model: the model, which is cut in place.
        strategy: how the model is held, on a pipeline of two ranks or more.
        config: resolved settings.
        architecture: what the model was built from.
        layers_per_stage: the number of layers of each stage, the same on all ranks.
        ranks: the ranks of the default process group.
        where: the device to which this rank's stages go.
        bucket_bytes: bytes of gradients that zero1 reduces at a time.
    """
    assert isinstance(model, DhenModel)
    assert config.batch_size is not None
    mesh = model_mesh(ranks.world, strategy.tensor, where.type, strategy.pipeline)
    examples = -(-config.batch_size * strategy.model_ranks // ranks.world)
    micro_batch = -(-examples // strategy.micro_batches)
    layout = None
    if strategy.tensor > 1:
        group = TensorGroup(mesh.get_group(TENSOR))
        model.split(group)
        layout = WeightLayout(model, group)  # before layers are taken out of it
    engine = PipelineEngine(
        model, architecture, strategy, config, mesh, layers_per_stage, micro_batch, where, bucket_bytes
    )
    if layout is not None:
        layout.clip_over_group(engine)
    return PipelineStep(engine, strategy, layout)


def _loss(logit: Tensor, target_B2: Tensor) -> Tensor:
    """Returns the sum of losses, each times what its example counts."""
    label_B, counted_B = target_B2.unbind(1)
    return cross_entropy(logit, label_B, counted_B) * len(label_B)


# The lookups of a pipeline: each of its ranks looks up a part of its examples, as all ranks hold the tables, and
# the first stage is given all.
#
# So tables are held and looked up over all ranks as without pipelines, and their engines know nothing of stages.
# Gradients go the way back.
#
# Shapes: B examples of the pipeline, P of this rank's part, V numbers of all embeddings of an example; T
# categorical tables, G growing ones among them, K numeric inputs, N numbers with buckets.


class PipelineLookups:
    """Where the ranks of one pipeline stand, and what they send each other around a step."""

    def __init__(self, group: dist.ProcessGroup, growing_bags: Sequence[int]) -> None:
        """Takes the ranks of the pipeline, first stage first, and the places of growing tables among multi-hot
        ones."""
        self._group, self._growing_bags = group, growing_bags
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def part(self, examples: int) -> slice:
        """Returns which of the pipeline's examples this rank looks up: all of them if there are fewer than
        ranks."""
        if examples < self._ranks:
            return slice(0, examples)
        return rank_slice(examples, self._rank, self._ranks)

    def features_of(self, features: FeatureBatch) -> FeatureBatch:
        """Returns this rank's part of the pipeline's inputs."""
        part = self.part(features.size)
        return _part_of(features, part.start, part.stop, self._growing_bags)

    @torch.no_grad()
    def gather(self, embeddings: Sequence[Tensor], examples: int) -> tuple[Tensor, ...]:
        """Returns the embeddings of all of the pipeline's examples on the first stage, nothing on others; a
        collective."""
        if examples < self._ranks:
            return () if self._rank else tuple(embeddings)
        longest, gathered = -(-examples // self._ranks), list[Tensor]()
        slices = [rank_slice(examples, rank, self._ranks) for rank in range(self._ranks)]
        for e in embeddings:
            part = e.detach()
            sent = torch.cat((part, part[:1])) if len(part) < longest else part.contiguous()
            if self._rank:
                dist.gather(sent, None, group=self._group, group_dst=0)
                continue
            whole = part.new_empty(self._ranks, longest, *part.shape[1:])
            dist.gather(sent, list(whole.unbind()), group=self._group, group_dst=0)
            if longest * self._ranks == examples:
                gathered.append(whole.flatten(0, 1))
            else:
                parts = zip(whole, slices, strict=True)
                gathered.append(torch.cat([rows[: s.stop - s.start] for rows, s in parts]))
        return tuple(gathered)

    @torch.no_grad()
    def scatter_gradients(self, whole: Sequence[Tensor], embeddings: Sequence[Tensor], examples: int) -> None:
        """Gives the embeddings that this rank looked up their gradients, from those of the first stage, which are
        freed; a collective.

        Each is multiplied by the number of the pipeline's ranks: engines divide by that of all ranks, where a
        pipeline's gradients are averaged over pipelines alone.
        """
        assert examples >= self._ranks
        longest = -(-examples // self._ranks)
        for place, e in enumerate(embeddings):
            received, parts = e.new_empty(longest, *e.shape[1:]), None
            if not self._rank:
                gradient = whole[place].grad
                assert gradient is not None
                gradient.mul_(self._ranks)
                # of parts that are an example shorter a rank takes one no notice of; the last one is the longest
                starts = [rank_slice(examples, rank, self._ranks).start for rank in range(self._ranks)]
                parts = [gradient[start : start + longest] for start in starts]
                whole[place].grad = None
            dist.scatter(received, parts, group=self._group, group_src=0)
            e.grad = received[: len(e)]


def _part_of(features: FeatureBatch, start: int, stop: int, growing_bags: Sequence[int]) -> FeatureBatch:
    """Returns the inputs of examples that lie one after another."""
    spans = [_span(ids, offsets_B, start, stop) for ids, offsets_B in features.bags]
    keys = None
    if features.keys is not None:
        of_growing = zip(features.keys.bags, (spans[place] for place in growing_bags), strict=True)
        keys = Keys(features.keys.columns_BG[start:stop], tuple(keys[span] for keys, span in of_growing))
    bags = zip(features.bags, spans, strict=True)
    return replace(
        features.each(lambda tensor: tensor[start:stop]),
        bags=tuple((ids[span], offsets_B[start:stop] - span.start) for (ids, offsets_B), span in bags),
        keys=keys,
    )


def _span(ids: Tensor, offsets_B: Tensor, start: int, stop: int) -> slice:
    """Returns where the ids of these examples lie among all."""
    first = int(offsets_B[start]) if start < len(offsets_B) else len(ids)
    return slice(first, int(offsets_B[stop]) if stop < len(offsets_B) else len(ids))
