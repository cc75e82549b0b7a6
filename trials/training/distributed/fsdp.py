"""PyTorch's `fully_shard` (FSDP, arXiv 2304.11277) on every DHEN layer and on the rest together:
shard_grad_op, fsdp and hsdp, with `CPUOffloadPolicy`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trials.optim.adamw import (
    DTYPES,
    MOMENTS,
    Clip,
    adamw,
    all_finite,
    moments,
    set_steps,
)
from trials.records.job import TrainingConfig
from trials.records.strategy import Strategy
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import (
    DenseInputs,
    Engine,
    checkpoint_layers,
    layers_of,
)


class FSDPEngine(Engine):
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
        checkpoint_layers(model, strategy.checkpointing)
        for unit in (*layers_of(model), model):
            unit.register_forward_hook(_without_view)
        for layer in layers_of(model):
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
        """See `Engine`."""
        logit_B = super().predict(inputs)
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
        """See `Engine`."""
        self.clip(_local(p.grad) for p in self.module.parameters() if p.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def is_finite(self) -> bool:
        """See `Engine`."""
        return all(all_finite(_local(p.detach())) for p in self.module.parameters())

    def weights(self) -> Weights:
        """See `Engine`."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Weights = dict(get_model_state_dict(self.module, options=options))  # type: ignore[arg-type]
        # on one rank, and a CPU, these are the parameters themselves
        own = {_local(p.detach()).data_ptr() for p in self.module.parameters()}
        return {name: w.clone() if w.data_ptr() in own else w for name, w in weights.items()}

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """See `Engine`."""
        parameters = list(self.module.parameters())
        starts = list(accumulate((p.numel() for p in parameters), initial=0))
        pieces_by_name: dict[str, list[Piece]] = {"weight": [], **{moment: [] for moment in MOMENTS}}
        for start, p in zip(starts, parameters, strict=False):
            assert isinstance(p, DTensor)
            # this rank's shard are rows that follow one another
            _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            first = start + offset[0] * (p.numel() // len(p))
            for name, tensor in {"weight": p.detach(), **moments(self.optimizer, p)}.items():
                if (local := _local(tensor)).numel():
                    pieces_by_name[name].append(Piece(first, local.view(-1)))
        return {name: FlatPieces(starts[-1], tuple(pieces)) for name, pieces in pieces_by_name.items()}

    def restored(self, steps: int) -> None:
        """See `Engine`."""
        for p in self.module.parameters():
            set_steps(self.optimizer, p, steps)


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _without_view(_: nn.Module, __: tuple[object, ...], output: Tensor) -> Tensor:
    """Copies a view: `fully_shard` puts its hooks on a unit's output, and warns that they could be lost on a
    view."""
    return output if output._base is None else output.clone()
