"""Reads from a wrapped model which strategy it is held with: what the engines did, not what was asked of them.

Names of `fully_shard` that torch does not promise to keep are used here alone. Where several strategies hold
a network alike, the first one of the ladder is read: a network without DHEN layers has nothing that fsdp
could free between forward and backward, so that it is held as by shard_grad_op, and a single layer that is
recomputed is every second layer as much as every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from trials.records.strategy import RECOMPUTED, Checkpointing, Dense, Strategy
from trials.training.distributed.engine import Engine
from trials.training.distributed.parallelize import ParallelStep
from trials.training.distributed.pipeline import layer_count
from trials.training.distributed.pipeline_step import PipelineStep
from trials.training.distributed.tensor_parallel import TensorParallel
from trials.training.distributed.zero import Zero
from trials.training.distributed.zero_offload import ZeroOffload


def executed_strategy(step: ParallelStep | PipelineStep) -> Strategy:
    """The strategy that a step's modules, optimizer and micro-batches are those of."""
    tensor, engine = 1, step.engine
    if isinstance(engine, TensorParallel):
        tensor, engine = engine.group.size, engine.engine
    if isinstance(step, PipelineStep):
        return _pipelined(step, tensor)
    model = engine.module
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return Strategy(
        tensor=tensor,
        dense=_fully_sharded(groups[0], units[1:]) if units else _replicated(engine),
        checkpointing=_checkpointing(model),
        offload=any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        micro_batches=step.micro_batches,
        no_sync=bool(units) and step.micro_batches > 1 and not _reduces_each(step, groups[0]),
    )


def _pipelined(step: PipelineStep, tensor: int) -> Strategy:
    """The strategy of a rank that has some of the layers, or parts of them; checkpointing recomputes some."""
    engine = step.pipeline
    layers, count = engine.module.layers, layer_count(engine.module)
    assert isinstance(layers, nn.ModuleDict)
    held = {int(name) for name in layers}
    recomputed = {int(name) for name, layer in layers.items() if isinstance(layer, CheckpointWrapper)}
    # what was asked for is looked at first: a stage of one layer looks alike under several
    names: tuple[Checkpointing, ...] = (engine.checkpointing, *get_args(Checkpointing))
    return Strategy(
        tensor=tensor,
        dense="zero1" if engine.is_zero else "dp",
        checkpointing=next(n for n in names if held & {*range(count)[RECOMPUTED[n]]} == recomputed),
        pipeline=step.ranks,
        schedule=step.schedule,
        micro_batches=step.micro_batches,
    )


def _reduces_each(step: ParallelStep, group: FSDPParamGroup) -> bool:
    """Whether gradients are reduced after a micro-batch that another one follows."""
    step.engine.accumulate_only(True)
    reduces = group.reduce_grads
    step.engine.accumulate_only(False)
    return reduces


def _replicated(engine: Engine) -> Dense:
    """How the state is held where weights are on every rank: masters in the host's memory, or whole gradients that
    stay in ZeRO's buckets, or go."""
    if isinstance(engine, ZeroOffload):
        return "zero_offload"
    if not isinstance(engine, Zero):
        return "dp"
    return "zero2" if engine.buckets[0].gradients is None else "zero1"


def _fully_sharded(first: FSDPParamGroup, layers: Sequence[FSDPModule]) -> Dense:
    """How `fully_shard` holds parameters: on a mesh of two dimensions; of layers, freed after forward or kept.

    The first unit, which has what lies around the layers, keeps its parameters in any case.
    """
    if isinstance(first.mesh_info, HSDPMeshInfo):
        return "hsdp"
    freed = [layer._get_fsdp_state()._fsdp_param_groups[0].post_forward_mesh_info for layer in layers]
    return "fsdp" if any(freed) else "shard_grad_op"


def _checkpointing(model: nn.Module) -> Checkpointing:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    layers = getattr(plain, "layers", nn.ModuleList())
    assert isinstance(layers, nn.ModuleList)
    recomputed = [index for index, layer in enumerate(layers) if isinstance(layer, CheckpointWrapper)]
    every = list(range(len(layers)))
    names: tuple[Checkpointing, ...] = get_args(Checkpointing)
    return next(name for name in names if every[RECOMPUTED[name]] == recomputed)
