"""Reads from a wrapped model which strategy it is held with: what the engines did, not what was asked of them.

Names of `fully_shard` that torch does not promise to keep are used here alone. Where several strategies hold
a network alike, the first one of the ladder is read: a network without DHEN layers has nothing that fsdp
could free between forward and backward, so that it is held as by shard_grad_op, and a single layer that is
recomputed is every second layer as much as every layer.
"""

from __future__ import annotations

from typing import get_args

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.nn.parallel import DistributedDataParallel

from trials.records.strategy import RECOMPUTED, Checkpointing, Dense, Strategy
from trials.training.distributed.parallelize import ParallelStep
from trials.training.distributed.pipeline import layer_count
from trials.training.distributed.pipeline_step import PipelineStep
from trials.training.distributed.zero import Zero
from trials.training.distributed.zero_offload import ZeroOffload


def executed_strategy(step: ParallelStep) -> Strategy:
    """The strategy that a step's modules, optimizer and micro-batches are those of."""
    tensor = 1 if step.layout is None else step.layout.group.size
    engine, model = step.engine, step.engine.module
    if isinstance(step, PipelineStep):
        return Strategy(
            tensor=tensor,
            dense="zero1" if step.engine.is_zero else "dp",
            # what was asked for is looked at first: a stage of one layer looks alike under several
            checkpointing=_checkpointing(model, layer_count(model), step.engine.checkpointing),
            pipeline=step.ranks,
            schedule=step.schedule,
            micro_batches=step.micro_batches,
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    no_sync = False
    if units and step.micro_batches > 1:  # whether gradients are reduced only after the last micro-batch
        engine.accumulate_only(True)
        no_sync = not groups[0].reduce_grads
        engine.accumulate_only(False)
    dense: Dense = "dp"
    if units and isinstance(groups[0].mesh_info, HSDPMeshInfo):
        dense = "hsdp"
    elif units:
        # the first unit, which has what lies around the layers, keeps its parameters after forward in any case
        layers = [unit._get_fsdp_state()._fsdp_param_groups[0] for unit in units[1:]]
        dense = "fsdp" if any(layer.post_forward_mesh_info for layer in layers) else "shard_grad_op"
    elif isinstance(engine, ZeroOffload):  # masters are in the host's memory
        dense = "zero_offload"
    elif isinstance(engine, Zero):  # whole gradients stay in the buckets, or go
        dense = "zero2" if engine.buckets[0].gradients is None else "zero1"
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return Strategy(
        tensor=tensor,
        dense=dense,
        checkpointing=_checkpointing(plain, len(getattr(plain, "layers", ()))),
        offload=any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        micro_batches=step.micro_batches,
        no_sync=no_sync,
    )


def _checkpointing(model: nn.Module, count: int, *asked: Checkpointing) -> Checkpointing:
    """Which of so many layers are recomputed, by those that are held here."""
    layers = getattr(model, "layers", nn.ModuleList()).named_children()
    held = {int(name): isinstance(layer, CheckpointWrapper) for name, layer in layers}
    recomputed = {index for index, is_wrapped in held.items() if is_wrapped}
    names: tuple[Checkpointing, ...] = (*asked, *get_args(Checkpointing))
    return next(name for name in names if held.keys() & {*range(count)[RECOMPUTED[name]]} == recomputed)
