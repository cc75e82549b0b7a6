"""Applies a strategy to the dense part of a model, and trains it one step at a time.

The engines are DDP (`trials.training.distributed.ddp`: dp), ZeRO's stages 1 and 2
(`trials.training.distributed.zero`; stage 1 with one-bit Adam in `trials.training.distributed.one_bit_engine`),
ZeRO-Offload (`trials.training.distributed.zero_offload`) and FSDP (`trials.training.distributed.fsdp`:
shard_grad_op, fsdp, hsdp). Embedding tables are not part of it (`trials.training.distributed.engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dhen.members import cross_entropy
from trials.planner.collectives import BUCKET_BYTES
from trials.records.job import TrainingConfig
from trials.records.strategy import DELAYING, Dense, Strategy
from trials.training.distributed.ddp import DDPEngine, average_gradients
from trials.training.distributed.engine import (
    DenseBatch,
    Engine,
    checkpoint_layers,
    part_of,
    pass_on_gradients,
)
from trials.training.distributed.fsdp import FSDPEngine
from trials.training.distributed.one_bit_engine import OneBitZero
from trials.training.distributed.tensor_parallel import (
    DATA,
    TENSOR,
    TensorGroup,
    WeightLayout,
    model_mesh,
)
from trials.training.distributed.zero import Zero
from trials.training.distributed.zero_offload import ZeroOffload

Replicate = Callable[[nn.Module, int, dist.ProcessGroup | None], nn.Module]
"""What wraps a module so that ranks average its gradients, in buckets of so many bytes."""


class ParallelStep:
    """Training steps of the dense part under a strategy; every rank makes the same calls."""

    def __init__(self, engine: Engine, micro_batches: int, layout: WeightLayout | None = None) -> None:
        """`layout` is where the engine's part of the model lies in the whole one, if modules are split over
        ranks."""
        self.engine, self.micro_batches, self.layout = engine, micro_batches, layout

    def forward_backward(self, batch: DenseBatch, weight: float = 1.0) -> Tensor:
        """Runs all micro-batches forward and backward; returns this rank's loss, detached.

        `weight` multiplies loss and gradients. With a rank's number of examples over the ranks' mean number as its
        weight, the mean over ranks is the mean over all examples.
        """
        size, micro_batches = len(batch.label_B), self.micro_batches
        loss = torch.zeros((), device=batch.label_B.device)
        for start, stop in pairwise(size * index // micro_batches for index in range(micro_batches + 1)):
            self.engine.accumulate_only(stop < size)
            # ranks gather weights in each micro-batch, so in one without examples they compute one that counts 0
            last = max(stop, start + 1)
            micro_batch = batch if micro_batches == 1 else part_of(batch, slice(start, last))
            loss += self._micro_batch(micro_batch, share=weight * (stop - start) / size)
            if micro_batch is not batch and start < stop:
                pass_on_gradients(micro_batch, batch, start)
        return loss

    def update(self) -> None:
        """Runs the dense part's optimizer step and frees its gradients."""
        self.engine.update()

    def _micro_batch(self, batch: DenseBatch, share: float) -> Tensor:
        loss = share * cross_entropy(self.engine.module(batch.inputs), batch.label_B, batch.weight_B)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def device_mesh(
    dense: Dense, hosts: int, gpus_per_host: int, device_type: str, tensor: int = 1
) -> DeviceMesh:
    """Returns all ranks in a row, hosts x ranks for hsdp, or with tensor ranks; needs a process group of so many
    ranks."""
    if tensor > 1:
        return model_mesh(hosts * gpus_per_host, tensor, device_type)
    if dense == "hsdp":
        return init_device_mesh(device_type, (hosts, gpus_per_host), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (hosts * gpus_per_host,))


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    config: TrainingConfig,
    mesh: DeviceMesh | None = None,
    *,
    where: torch.device | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    replicate: Replicate = average_gradients,
    total_examples: int = 0,
) -> ParallelStep:
    """Takes a model over whose tables were taken (`trials.training.distributed.engine.take_tables`), in fp32,
    alike on all ranks.

    Args:
        model: the model, which is wrapped in place.
        strategy: how the model is held.
        config: resolved settings of the dense part's AdamW and precision.
        mesh: the ranks, from `device_mesh`; None for dp and zero_offload on one rank, which need no process group.
        where: the device that zero_offload takes the model to; by default the one that it is on. Other strategies
            take a model that is there.
        bucket_bytes: bytes of gradients that dp and zero1 reduce at a time.
        replicate: what dp wraps a model in if there are several ranks, given the bytes of a bucket and the
            process group of the ranks.
        total_examples: those of all passes, which decide when one-bit Adam and PowerSGD begin.
    """
    engine: Engine
    assert strategy.dense == DELAYING or not config.delayed_update
    assert strategy.can_compress or config.optimizer == "adamw"
    if strategy.tensor > 1:
        assert mesh is not None
        group = TensorGroup(mesh.get_group(TENSOR))
        model.split(group)  # type: ignore[operator]
        layout = WeightLayout(model, group)
        alike = strategy.replace(tensor=1)
        step = parallelize(model, alike, config, mesh[DATA], bucket_bytes=bucket_bytes, replicate=replicate)
        layout.clip_over_group(step.engine)
        return ParallelStep(step.engine, strategy.micro_batches, layout)
    if strategy.fully_sharded:
        assert mesh is not None
        engine = FSDPEngine(model, strategy, config, mesh)
    elif strategy.dense == "dp":
        data = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
        in_buckets = None if data is None else lambda module: replicate(module, bucket_bytes, data)
        engine = DDPEngine(model, strategy, config, in_buckets, total_examples)
    elif strategy.dense == "zero_offload":
        where = where or next(model.parameters()).device
        engine = ZeroOffload(model, config, mesh.get_group() if mesh else None, where)
        checkpoint_layers(model, strategy.checkpointing)
    elif config.optimizer == "onebit_adam":
        assert mesh is not None
        engine = OneBitZero(model, config, mesh.get_group(), total_examples)
        checkpoint_layers(model, strategy.checkpointing)
    else:
        assert mesh is not None
        keeps = strategy.dense == "zero1"
        engine = Zero(model, config, mesh.get_group(), keeps_gradients=keeps, bucket_bytes=bucket_bytes)
        checkpoint_layers(model, strategy.checkpointing)
    return ParallelStep(engine, strategy.micro_batches)
