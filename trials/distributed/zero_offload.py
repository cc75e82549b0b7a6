"""ZeRO-Offload (arXiv 2101.06840): weights on the device, optimizer state and the optimizer's step on the host.

Weights lie on every rank in the buckets of ZeRO's stage 2, one a layer, in the precision that the model
computes in. Behind backward a bucket's gradients are averaged and scattered to their owners, and each owner's
part leaves for the host while backward goes on with the layer before. The host has fp32 masters and AdamW's
moments of the own part (`trials.distributed.host_optimizer`); it updates them, and the updated weights go back
and are gathered. On one rank there is nothing to scatter, and the part is the bucket.

With `training.delayed_update` the host updates while the device goes on with the next step, which computes with
the weights of the update before: a gradient is applied one update late. The first `DELAY_AFTER` updates are
not delayed. What is under way is waited for before weights are read, saved or
loaded, and where the training loop says so (`finish`), so that a training that goes on from a checkpoint delays
the same updates.

With `training.clip_norm` the own parts' gradients are clipped on the host before the update, in the calling thread
also where the update is delayed: the norm is a collective, whose order all ranks share.

Left out of the paper: its own CPU kernel (PyTorch's fused AdamW takes the place of it), and the copy of one
layer's weights while the host updates the next.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trials.checkpoint.dcp_vectors import FlatPieces
from trials.distributed.buckets import (
    Bucket,
    Group,
    bucket_parameters,
    hand_out,
    own_state,
    whole_weights,
)
from trials.distributed.host_optimizer import HostOptimizer
from trials.distributed.scattered_gradients import ScatteredGradients
from trials.distributed.table_split import DenseInputs
from trials.job import DELAY_AFTER, TrainingConfig
from trials.optim.adamw import set_steps
from trials.optim.clip import Clip
from trials.optim.master_weights import DTYPES, all_finite, dense_parameters
from trials.storage.weights_file import Weights


class ZeroOffload:
    """The engine of zero_offload."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        process_group: dist.ProcessGroup | None,
        where: torch.device,
    ) -> None:
        """Takes the weights of a model over, which is alike on all ranks.

        Args:
            model: the model, best in the host's memory; its parameters become views of buckets on the device.
            config: resolved settings of AdamW, of precision and of delay.
            process_group: the ranks that share the state; None for one rank.
            where: the device that the model computes on.
        """
        assert config.precision != "auto"
        self.module, self._config = model, config
        self._group, self._names = Group.of(process_group), tuple(dense_parameters(model))
        dtype = DTYPES[config.precision]
        self.buckets = [
            Bucket(parameters, dtype, self._group, where=where, masters_on_host=True)
            for parameters in bucket_parameters(model, dtype.itemsize, 0)
        ]
        for buffer in model.buffers():
            buffer.data = buffer.to(where)
        self._indices = {id(bucket): index for index, bucket in enumerate(self.buckets)}
        on_accelerator = where.type == "cuda"
        self._host = HostOptimizer([b.master for b in self.buckets], config, pinned=on_accelerator)
        self.optimizer = self._host.settings
        self._stream = torch.cuda.Stream(where) if on_accelerator else None  # type: ignore[no-untyped-call]
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None
        sent_in = DTYPES[config.reduction_precision(config.precision)]
        self._gradients = ScatteredGradients(self.buckets, self._group, sent_in, self._leave)
        self.clip, self._updates = Clip(config.clip_norm, self._group.process_group), 0

    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B without gradients; every rank has all weights, so that nothing is sent."""
        self.finish()
        with torch.no_grad():
            return self.module(inputs)  # type: ignore[no-any-return]

    def accumulate_only(self, yes: bool) -> None:
        """Does nothing: gradients leave in every micro-batch, and the host adds them up."""

    def update(self) -> None:
        """Updates the own parts on the host and hands them out; with delay, begins to update, and hands out
        what the update before has made."""
        self._gradients.settle()
        assert all(bucket.missing == len(bucket.parameters) for bucket in self.buckets)
        self._let_go()
        self.finish()
        self.clip(self._host.gradients())
        if self._config.delayed_update and self._updates >= DELAY_AFTER:
            self._host.begin_step()
        else:
            self._host.step()
            self._publish()
        self._updates += 1

    def finish(self) -> None:
        """Waits for the update that is under way, if any, and hands the weights out; a collective."""
        if self._host.finish():
            self._publish()

    def is_finite(self) -> bool:
        """Tells whether no weight of the own parts is NaN or infinite."""
        self.finish()
        return all(all_finite(bucket.master) for bucket in self.buckets)

    def weights(self) -> Weights:
        """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective."""
        self.finish()
        return whole_weights(self.module, self._names, self.buckets, self._group)

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the own parts of weights and moments, to save or to load into (`restored`); a collective."""
        self.finish()
        return own_state(self.buckets, self._host.optimizer)

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, and hands the weights out; a collective."""
        self.finish()
        for bucket in self.buckets:
            set_steps(self._host.optimizer, bucket.master, steps)
        self._updates = steps
        self._host.cast()  # nothing is under way on the host or to the device
        self._publish()

    def _leave(self, bucket: Bucket, part: Tensor) -> None:
        """Sends an averaged part to the host. On an accelerator no more than one is on its way: what computes next
        waits for the one before, whose memory is free then."""
        self._let_go()
        copied = self._host.take(self._indices[id(bucket)], part, self._stream)
        if copied is not None:
            self._leaving = part, copied

    def _let_go(self) -> None:
        """Frees the part that has left, once the device gets there."""
        if self._leaving is not None:
            torch.cuda.current_stream().wait_event(self._leaving[1])
            self._leaving = None

    def _publish(self) -> None:
        """Copies updated weights to the device and hands them out."""
        with torch.no_grad():
            for bucket, outgoing in zip(self.buckets, self._host.outgoing, strict=True):
                bucket.own.copy_(outgoing, non_blocking=True)
        if self._stream is not None:
            self._host.taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._host.taken.record()
        hand_out(self.buckets, self._group)
