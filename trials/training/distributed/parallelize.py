"""DistributedDataParallel's all-reduce in another precision than that of the gradients.

torch has a hook for bf16 (`bf16_compress_hook`), which refuses gloo, though gloo adds bf16 up. This one goes on
every backend, and both ways. Where what is sent is smaller, it lies in the bucket itself: however many buckets are
on their way, no memory is held for them.

Sums are rounded to bf16 at each step of a ring, as in `fully_shard` with bf16 for its `reduce_dtype`. An
all-to-all and sums in fp32 would round only twice, but every rank of a host would send other hosts what a ring
sends once.

Applies a strategy to the dense part of a model, and trains it one step at a time.

The engines are PyTorch's DistributedDataParallel around `MasterWeights` (dp), ZeRO's stages 1 and 2
(`trials.training.distributed.zero`; stage 1 with one-bit Adam in `trials.training.distributed.one_bit_engine`),
ZeRO-Offload (`trials.training.distributed.zero_offload`), and PyTorch's `fully_shard` on every DHEN layer and
on the rest together (shard_grad_op, fsdp, hsdp; arXiv 2304.11277), with `checkpoint_wrapper` on layers (arXiv
1604.06174) and `CPUOffloadPolicy`. Embedding tables are not part of it (`trials.training.distributed.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dhen.members import cross_entropy
from trials.optim.adamw import (
    DTYPES,
    MOMENTS,
    Clip,
    MasterWeights,
    adamw,
    all_finite,
    dense_parameters,
    moments,
    set_steps,
)
from trials.optim.one_bit_adam import OneBitAdam
from trials.planner.collectives import BUCKET_BYTES
from trials.records.job import TrainingConfig
from trials.records.strategy import DELAYING, RECOMPUTED, Checkpointing, Dense, Strategy
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import DenseBatch, DenseInputs, Engine, part_of, pass_on_gradients
from trials.training.distributed.one_bit_engine import OneBitZero, begins_later, one_bit_state, take_over
from trials.training.distributed.power_sgd import PowerSgd, lay_gradients_in_buckets
from trials.training.distributed.tensor_parallel import (
    DATA,
    TENSOR,
    Layout,
    TensorGroup,
    TensorParallel,
    model_mesh,
)
from trials.training.distributed.zero import Zero
from trials.training.distributed.zero_offload import ZeroOffload

# torch looks at a hook's annotations, which must not be postponed

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def averaged_in(dtype: torch.dtype) -> Hook:
    """Returns a communication hook that averages the gradients of a bucket over the ranks of a process group, cast
    to `dtype` on their way; the group is the hook's state, None for all ranks."""

    def hook(group: Any, bucket: GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        sent = cast_bucket(gradients, dtype)
        work = dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=group, async_op=True)
        assert work is not None
        averaged: Future[Tensor] = work.get_future().then(lambda _: _cast_back(sent, gradients))
        return averaged

    return hook


def cast_bucket(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a bucket's gradients, each (N), to what they are sent in: in the bucket's own memory where it has
    room."""
    cast = gradients.to(dtype)
    if cast.element_size() > gradients.element_size():
        return cast
    return gradients.view(dtype)[: len(cast)].copy_(cast)


def _cast_back(sent: Tensor, gradients: Tensor) -> Tensor:
    shared = sent.untyped_storage().data_ptr() == gradients.untyped_storage().data_ptr()
    return gradients.copy_(sent.clone() if shared else sent)


MIB = 2**20
Replicate = Callable[[nn.Module, int, dist.ProcessGroup | None], nn.Module]
"""What wraps a module so that ranks average its gradients, in buckets of so many bytes."""


class ParallelStep:
    """Training steps of the dense part under a strategy; every rank makes the same calls."""

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self.engine, self.micro_batches = engine, micro_batches

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
            micro_batch = batch if micro_batches == 1 else part_of(batch, start, last)
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


def average_gradients(
    model: nn.Module, bucket_bytes: int = BUCKET_BYTES, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Wraps a module so that gradients are averaged over all ranks, or those of a group, in buckets, while
    backward goes on."""
    return DistributedDataParallel(
        model,
        process_group=process_group,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        bucket_cap_mb=max(1, round(bucket_bytes / MIB)),
    )


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
        replicate: what dp wraps a model in where there are several ranks, given the bytes of a bucket and the
            process group of the ranks.
        total_examples: those of all passes, which decide when one-bit Adam and PowerSGD begin.
    """
    engine: Engine
    assert strategy.dense == DELAYING or not config.delayed_update
    assert strategy.can_compress or config.optimizer == "adamw"
    if strategy.tensor > 1:
        assert mesh is not None
        return _tensor_parallel(model, strategy, config, mesh, bucket_bytes, replicate)
    if strategy.fully_sharded:
        assert mesh is not None
        engine = _FullySharded(model, strategy, config, mesh)
    elif strategy.dense == "dp":
        ranks, group = (mesh.size(), mesh.get_group()) if mesh else (1, None)
        engine = Replicated(
            model,
            strategy,
            config,
            ranks,
            lambda module: replicate(module, bucket_bytes, group),
            total_examples,
        )
    elif strategy.dense == "zero_offload":
        where = where or next(model.parameters()).device
        engine = ZeroOffload(model, config, mesh.get_group() if mesh else None, where)
        _checkpoint_layers(model, strategy.checkpointing)
    elif config.optimizer == "onebit_adam":
        assert mesh is not None
        engine = OneBitZero(model, config, mesh.get_group(), total_examples)
        _checkpoint_layers(model, strategy.checkpointing)
    else:
        assert mesh is not None
        keeps = strategy.dense == "zero1"
        engine = Zero(model, config, mesh.get_group(), keeps_gradients=keeps, bucket_bytes=bucket_bytes)
        _checkpoint_layers(model, strategy.checkpointing)
    return ParallelStep(engine, strategy.micro_batches)


def _tensor_parallel(
    model: nn.Module,
    strategy: Strategy,
    config: TrainingConfig,
    mesh: DeviceMesh,
    bucket_bytes: int,
    replicate: Replicate,
) -> ParallelStep:
    """Keeps this rank's part of a model, and has an engine of data parallelism hold it."""
    group = TensorGroup(mesh.get_group(TENSOR))
    model.split(group)  # type: ignore[operator]
    layout = Layout(model, group)
    alike = strategy.replace(tensor=1)
    step = parallelize(model, alike, config, mesh[DATA], bucket_bytes=bucket_bytes, replicate=replicate)
    assert isinstance(step.engine, Replicated | Zero)
    return ParallelStep(TensorParallel(step.engine, layout, group), strategy.micro_batches)


class Replicated:
    """The engine of dp: weights, gradients and the optimizer's state on every rank."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        config: TrainingConfig,
        ranks: int,
        replicate: Callable[[nn.Module], nn.Module],
        total_examples: int = 0,
    ) -> None:
        assert config.precision != "auto"
        self._model, self._master = model, MasterWeights(model, config.precision)
        _checkpoint_layers(model, strategy.checkpointing)
        self._in_buckets = ranks > 1
        self.module = replicate(model) if self._in_buckets else model
        reduced = DTYPES[config.reduction_precision(config.precision)]
        if isinstance(self.module, DistributedDataParallel) and reduced is not DTYPES[config.precision]:
            self.module.register_comm_hook(self.module.process_group, averaged_in(reduced))
        flat, self.clip = self._master.flat, Clip(config.clip_norm)
        self._one_bit: OneBitAdam | None = None
        if config.optimizer == "onebit_adam":
            sizes = [p.numel() for p in dense_parameters(model).values()]
            group = dist.group.WORLD if self._in_buckets else None
            self._one_bit = OneBitAdam(flat, config, group, sizes, total_examples)
        self.optimizer = self._one_bit or adamw([flat], config)
        self._power_sgd: PowerSgd | None = None
        if isinstance(self.module, DistributedDataParallel):
            if strategy.micro_batches > 1 or self._one_bit is not None or config.power_sgd_rank:
                lay_gradients_in_buckets(self.module)
            if config.power_sgd_rank:
                assert config.batch_size is not None
                steps = total_examples // config.batch_size
                self._power_sgd = PowerSgd(self.module, config.power_sgd_rank, steps)

    def predict(self, inputs: DenseInputs) -> Tensor:
        """See `Engine`."""
        with torch.no_grad():
            return self._model(inputs)  # type: ignore[no-any-return]

    def accumulate_only(self, yes: bool) -> None:
        """See `Engine`."""
        if isinstance(self.module, DistributedDataParallel):
            compresses = self._one_bit is not None and self._one_bit.compresses
            self.module.require_backward_grad_sync = not (yes or compresses)

    def update(self) -> None:
        """See `Engine`."""
        self._master.gather_gradients(in_buckets=self._in_buckets)
        self.average_whole()
        self.clip([self._master.flat.grad])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._master.publish()
        if self._one_bit is not None and not self._one_bit.compresses and self._one_bit.is_steady():
            flat = self._master.flat
            self._one_bit.freeze(flat.detach(), *moments(self._one_bit, flat).values())
            self.clip.of_own_gradients(self._one_bit.group)

    def average_whole(self) -> None:
        """Averages the gradients of all micro-batches over ranks, where nothing has before."""

    def is_finite(self) -> bool:
        """See `Engine`."""
        return all_finite(self._master.flat)

    def weights(self) -> Weights:
        """See `Engine`."""
        if isinstance(self.module, DistributedDataParallel) and dist.get_rank(self.module.process_group):
            return {}
        return self._master.weights()

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """See `Engine`."""
        flat = self._master.flat
        more: dict[str, FlatPieces] = {}
        vectors = {"weight": flat.detach()}
        if self._one_bit is not None:
            if begins_later(self._one_bit, saved):
                zeros = (torch.zeros_like(flat.detach()) for _ in range(2))
                self._one_bit.begin_second_stage(flat.detach(), *zeros)
            more = one_bit_state(self._one_bit, saved)
        if self._power_sgd is not None:
            more = self._power_sgd.state(saved)
        if self._one_bit is None or not self._one_bit.compresses:
            vectors |= moments(self.optimizer, flat)
        return more | {name: FlatPieces(flat.numel(), (Piece(0, each),)) for name, each in vectors.items()}

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """See `trials.training.distributed.tensor_parallel.PartEngine`: one gradient, of all weights."""
        return [[(0, self._master.flat.numel())]]

    def restored(self, steps: int) -> None:
        """See `Engine`."""
        if self._one_bit is not None:
            take_over(self._one_bit, steps)
        if self._power_sgd is not None:
            self._power_sgd.restored(steps)
        if self._one_bit is None or not self._one_bit.compresses:
            set_steps(self.optimizer, self._master.flat, steps)
        else:
            self.clip.of_own_gradients(self._one_bit.group)
        self._master.publish()


class _FullySharded:
    """The engine of shard_grad_op, fsdp and hsdp: every rank, or every rank of a host, holds an equal part of each
    weight."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, config: TrainingConfig, mesh: DeviceMesh
    ) -> None:
        assert config.precision != "auto"
        dtype, reduced = DTYPES[config.precision], DTYPES[config.reduction_precision(config.precision)]
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype is torch.float32 else dtype,
            reduce_dtype=None if reduced is dtype else reduced,
            cast_forward_inputs=False,
        )
        offload = (
            CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if strategy.offload else OffloadPolicy()
        )
        keep = strategy.dense == "shard_grad_op"
        _checkpoint_layers(model, strategy.checkpointing)
        for unit in (*_layers(model), model):
            unit.register_forward_hook(_without_view)
        for layer in _layers(model):
            fully_shard(
                layer, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy, offload_policy=offload
            )
        # None: what lies around the layers is needed again as soon as backward begins, so it stays gathered
        fully_shard(model, mesh=mesh, reshard_after_forward=None, mp_policy=policy, offload_policy=offload)
        self.module = model
        self._no_sync, self._across_hosts = strategy.no_sync, strategy.dense == "hsdp"
        self.optimizer = adamw(list(model.parameters()), config)
        # under hsdp the ranks of a host hold all of the gradients, alike on every host
        group = mesh.get_group("shard") if self._across_hosts else mesh.get_group()
        self.clip = Clip(config.clip_norm, group)

    def predict(self, inputs: DenseInputs) -> Tensor:
        with torch.no_grad():
            logit_B: Tensor = self.module(inputs)
        for unit in self.module.modules():  # what a forward without backward would leave gathered
            if isinstance(unit, FSDPModule):
                unit.reshard()
        return logit_B

    def accumulate_only(self, yes: bool) -> None:
        """Sets what waits for the last micro-batch.

        With `no_sync` all reductions wait, and gradients stay whole. Without it they are scattered after every
        micro-batch, so that memory stays small; only hsdp's all-reduce across hosts waits, which takes no memory:
        the shard that is summed up takes the place of the gradient's shard.
        """
        assert isinstance(self.module, FSDPModule)
        if self._no_sync:
            self.module.set_requires_gradient_sync(not yes)
        elif self._across_hosts:
            self.module.set_requires_all_reduce(not yes)

    def update(self) -> None:
        self.clip(_local(p.grad) for p in self.module.parameters() if p.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def is_finite(self) -> bool:
        return all(all_finite(_local(p.detach())) for p in self.module.parameters())

    def weights(self) -> Weights:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Weights = dict(get_model_state_dict(self.module, options=options))  # type: ignore[arg-type]
        # on one rank, and a CPU, these are the parameters themselves
        own = {_local(p.detach()).data_ptr() for p in self.module.parameters()}
        return {name: w.clone() if w.data_ptr() in own else w for name, w in weights.items()}

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        parameters = [(_first_value(p), p) for p in self.module.parameters()]
        starts = list(accumulate((p.numel() for _, p in parameters), initial=0))
        pieces_by_name: dict[str, list[Piece]] = {"weight": [], **{moment: [] for moment in MOMENTS}}
        for start, (offset, p) in zip(starts, parameters, strict=False):
            for name, tensor in {"weight": p.detach(), **moments(self.optimizer, p)}.items():
                if (local := _local(tensor)).numel():
                    pieces_by_name[name].append(Piece(start + offset, local.view(-1)))
        return {name: FlatPieces(starts[-1], tuple(pieces)) for name, pieces in pieces_by_name.items()}

    def restored(self, steps: int) -> None:
        for p in self.module.parameters():
            set_steps(self.optimizer, p, steps)


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _first_value(parameter: Tensor) -> int:
    """Returns where this rank's shard of a parameter begins, in values: shards are rows that follow one
    another."""
    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0] * (parameter.numel() // len(parameter))


def _without_view(_: nn.Module, __: tuple[object, ...], output: Tensor) -> Tensor:
    """Copies a view: `fully_shard` puts its hooks on a unit's output, and warns that they could be lost on a
    view."""
    return output if output._base is None else output.clone()


def _layers(model: nn.Module) -> nn.ModuleList:
    layers = getattr(model, "layers", nn.ModuleList())
    assert isinstance(layers, nn.ModuleList)
    return layers


def _checkpoint_layers(model: nn.Module, checkpointing: Checkpointing) -> None:
    if checkpointing == "none":
        return
    layers = _layers(model)
    for index in range(len(layers))[RECOMPUTED[checkpointing]]:
        layers[index] = checkpoint_wrapper(layers[index])
