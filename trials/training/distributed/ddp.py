"""Plain data parallelism: PyTorch's DistributedDataParallel (DDP) around weights held by every rank.

DDP sends gradients in the precision in which they are, unless a hook does otherwise. torch has one for bf16
(`bf16_compress_hook`), which refuses gloo, though gloo adds bf16 up. Ours goes on every backend, and both ways. If
what is sent is smaller, it lies in the bucket itself: no memory is held for buckets on their way.

Sums are rounded to bf16 at each step of a ring, as in `fully_shard` with bf16 for its `reduce_dtype`. An
all-to-all and sums in fp32 would round only twice, but every rank of a host would send other hosts what a ring
sends once.
"""

# no postponed annotations here: torch looks at those of a hook

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trials.optim.adamw import (
    DTYPES,
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
from trials.records.strategy import Strategy
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.engine import (
    DenseInputs,
    Engine,
    checkpoint_layers,
)
from trials.training.distributed.one_bit_engine import begins_later, one_bit_state, take_over
from trials.training.distributed.power_sgd import PowerSgd, lay_gradients_in_buckets

Hook = Callable[[Any, GradBucket], Future[Tensor]]
MIB = 2**20


def averaged_in(dtype: torch.dtype) -> Hook:
    """Returns a communication hook that averages the gradients of a bucket over the ranks of a process group, cast
    to `dtype` on their way; the group is the hook's state, None for all ranks."""

    def hook(group: Any, bucket: GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        sent = cast_bucket(gradients, dtype)
        work = dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=group, async_op=True)
        assert work is not None
        shared = sent.untyped_storage().data_ptr() == gradients.untyped_storage().data_ptr()
        averaged: Future[Tensor] = work.get_future().then(
            lambda _: gradients.copy_(sent.clone() if shared else sent)
        )
        return averaged

    return hook


def cast_bucket(gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a bucket's gradients, each (N), to what they are sent in: in the bucket's own memory if it has
    room."""
    cast = gradients.to(dtype)
    if cast.element_size() > gradients.element_size():
        return cast
    return gradients.view(dtype)[: len(cast)].copy_(cast)


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


class DDPEngine(Engine):
    """The engine of dp: weights, gradients and the optimizer's state on every rank."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        config: TrainingConfig,
        replicate: Callable[[nn.Module], nn.Module] | None = None,
        total_examples: int = 0,
        *,
        aligned: bool = False,
    ) -> None:
        """Takes the weights of a model over.

        Args:
            model: the model, alike on all ranks.
            strategy: which layers are recomputed, and how many micro-batches there are.
            config: resolved settings.
            replicate: wraps the model so that ranks average its gradients; None for one rank.
            total_examples: those of all passes, which decide when gradients begin to be compressed.
            aligned: as `MasterWeights` takes it.
        """
        assert config.precision != "auto"
        self._model, self._master = model, MasterWeights(model, config.precision, aligned=aligned)
        checkpoint_layers(model, strategy.checkpointing)
        self._in_buckets = replicate is not None
        self.module = model if replicate is None else replicate(model)
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
        """Averages the gradients of all micro-batches over ranks, if nothing has before."""

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
        return more | {
            name: FlatPieces(
                self._master.length,
                tuple(Piece(start, values[place]) for start, place in self._master.ranges),
            )
            for name, values in vectors.items()
        }

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """See `Engine`: one gradient, of all weights."""
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
