"""Training steps of a DHEN whose layers lie on the ranks of pipelines, by `torch.distributed.pipelining`.

Each pipeline has its part of every batch, and the schedule is torch's. Where modules are split, the ranks of a
tensor group go through it side by side. Micro-batches are equally long, as what is
received has its place from the start: they are filled up with examples that count nothing.

Shapes: B examples of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from trials.training.distributed.engine import DenseBatch, DenseInputs, Engine, part_of
from trials.training.distributed.pipeline import PipelineEngine, boundary
from trials.training.distributed.tensor_parallel import (
    TENSOR,
    Layout,
    TensorGroup,
    TensorParallel,
    model_mesh,
)

SCHEDULES: dict[Schedule, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
"""Torch's names of schedules."""


class PipelineStep:
    """Training steps of the dense part on the ranks of pipelines; every rank makes the same calls."""

    def __init__(self, engine: PipelineEngine, strategy: Strategy, held: Engine | None = None) -> None:
        """Takes the engine of this rank's stages, the schedule and the number of micro-batches, and what holds the
        dense state where that is more than this engine."""
        # importing it takes most of a second, which trainings without pipelines do not need
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        self.pipeline, self.micro_batches, self.schedule = engine, strategy.micro_batches, strategy.schedule
        self.engine: Engine = held or engine
        self.ranks, self._micro = engine.ranks, engine.micro_batch

        class SplittingStage(PipelineStage):
            """A stage that tells operations of our own which pass runs."""

            def backward_maybe_with_nosync(self, backward_type: Any, *args: Any, **kwargs: Any) -> Any:
                with running(backward_type):
                    return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

        of_torch = [
            SplittingStage(
                stage.module,
                stage.number,
                len(engine.ends),
                engine.where,
                input_args=self._reaching(stage.number),
                output_args=self._leaving(stage.number),
                group=engine.group,
            )
            for stage in engine.stages
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
        parts = [_filled_part(batch, start, micro) for start in range(0, full, micro)]
        for number, part in enumerate(parts):
            here = slice(number * micro, (number + 1) * micro)
            for leaf, gradient in zip(part.inputs.embeddings, gradients, strict=True):
                leaf.grad = gradient[here]  # where backward adds it up
        self.pipeline.micro_batches.inputs = [part.inputs for part in parts]
        target = torch.cat([_target(part, weight / size) for part in parts])
        target[size:, 1] = 0.0  # of examples that fill up
        losses: list[Tensor] = []
        numbers = torch.arange(self.micro_batches)
        self._schedule.step(
            *((numbers,) if self.pipeline.first else ()),
            number=numbers,
            target=target if self.pipeline.has_last else None,
            losses=losses if self.pipeline.has_last else None,
            return_outputs=False,
        )
        self.pipeline.micro_batches.inputs = ()
        for leaf, gradient in zip(batch.inputs.embeddings, gradients, strict=True):
            leaf.grad = gradient[:size]
        if not losses:
            return torch.zeros((), device=self.pipeline.where)
        return self.ranks * torch.stack([loss.detach() for loss in losses]).sum()

    def update(self) -> None:
        """Runs the optimizer's step and frees gradients."""
        self.engine.update()

    def _reaching(self, stage: int) -> Tensor:
        """Returns a tensor without memory that is like what reaches a stage: a number for the first one."""
        return torch.zeros(1, dtype=torch.int64) if stage == 0 else self._leaving(stage - 1)

    def _leaving(self, stage: int) -> Tensor:
        """Returns a tensor without memory that is like what a stage puts out in training."""
        model, ends = self.pipeline.architecture, self.pipeline.ends
        of_heads = (self._micro,) if model.members == 1 else (self._micro, model.members)
        last = stage == len(ends) - 1
        shape = of_heads if last else boundary(model, ends[stage] - 1, self._micro)
        return torch.empty(shape, dtype=self.pipeline.dtype, device="meta", requires_grad=True)


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
    group = layout = None
    if strategy.tensor > 1:
        group = TensorGroup(mesh.get_group(TENSOR))
        model.split(group)
        layout = Layout(model, group)  # before layers are taken out of it
    engine = PipelineEngine(
        model, architecture, strategy, config, mesh, layers_per_stage, micro_batch, where, bucket_bytes
    )
    if group is None or layout is None:
        return PipelineStep(engine, strategy)
    return PipelineStep(engine, strategy, TensorParallel(engine, layout, group))


def _loss(logit: Tensor, target_B2: Tensor) -> Tensor:
    """Returns the sum of losses, each times what its example counts."""
    label_B, counted_B = target_B2.unbind(1)
    return cross_entropy(logit, label_B, counted_B) * len(label_B)


def _target(part: DenseBatch, share: float) -> Tensor:
    """Returns the label of each example and what its loss is multiplied by (B x 2)."""
    weight_B = torch.ones_like(part.label_B) if part.weight_B is None else part.weight_B
    return torch.stack((part.label_B, weight_B * share), dim=1)


def _filled_part(batch: DenseBatch, start: int, micro: int) -> DenseBatch:
    """Returns a micro-batch with leaves of its own, filled up from the batch's beginning where it is too short."""
    size = len(batch.label_B)
    if start + micro <= size:
        return part_of(batch, start, start + micro)
    rows = torch.arange(start, start + micro, device=batch.label_B.device) % size
    (embeddings, numeric_BK, share_BN), label_B, weight_B = batch
    return DenseBatch(
        DenseInputs(
            tuple(e.detach()[rows].requires_grad_() for e in embeddings),
            numeric_BK[rows],
            None if share_BN is None else share_BN[rows],
        ),
        label_B[rows],
        None if weight_B is None else weight_B[rows],
    )


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
        return tuple(whole for e in embeddings if (whole := self._gathered(e.detach(), examples)) is not None)

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

    def _gathered(self, part: Tensor, examples: int) -> Tensor | None:
        """Returns one tensor's rows of all ranks on the first, None on others."""
        longest, sent = -(-examples // self._ranks), part.contiguous()
        if len(part) < longest:
            sent = torch.cat((part, part[:1]))
        if self._rank:
            dist.gather(sent, None, group=self._group, group_dst=0)
            return None
        whole = part.new_empty(self._ranks, longest, *part.shape[1:])
        dist.gather(sent, list(whole.unbind()), group=self._group, group_dst=0)
        if longest * self._ranks == examples:
            return whole.flatten(0, 1)
        slices = [rank_slice(examples, rank, self._ranks) for rank in range(self._ranks)]
        return torch.cat([rows[: s.stop - s.start] for rows, s in zip(whole, slices, strict=True)])


def _part_of(features: FeatureBatch, start: int, stop: int, growing_bags: Sequence[int]) -> FeatureBatch:
    """Returns the inputs of examples that lie one after another."""
    spans = [_span(ids, offsets_B, start, stop) for ids, offsets_B in features.bags]
    keys = None
    if features.keys is not None:
        of_growing = zip(features.keys.bags, (spans[place] for place in growing_bags), strict=True)
        keys = Keys(features.keys.columns_BG[start:stop], tuple(keys[span] for keys, span in of_growing))
    return FeatureBatch(
        ids_BT=features.ids_BT[start:stop],
        bags=tuple(
            (ids[span], offsets_B[start:stop] - span.start)
            for (ids, offsets_B), span in zip(features.bags, spans, strict=True)
        ),
        numeric_BK=features.numeric_BK[start:stop],
        share_BN=None if features.share_BN is None else features.share_BN[start:stop],
        keys=keys,
    )


def _span(ids: Tensor, offsets_B: Tensor, start: int, stop: int) -> slice:
    """Returns where the ids of these examples lie among all."""
    first = int(offsets_B[start]) if start < len(offsets_B) else len(ids)
    return slice(first, int(offsets_B[stop]) if stop < len(offsets_B) else len(ids))
