"""ZeRO-Offload (arXiv 2101.06840): weights on the device, optimizer state and the optimizer's step on the host.

Weights lie on every rank in the buckets of ZeRO's stage 2, one a layer, in the precision that the model
computes in. Behind backward a bucket's gradients are averaged and scattered to their owners, and each owner's
part leaves for the host while backward goes on with the layer before. The host has fp32 masters and AdamW's
moments of the own part; it updates them, and the updated weights
go back and are gathered. On one rank there is nothing to scatter, and the part is the bucket.

With `training.delayed_update` the host updates while the device goes on with the next step, which computes
with the weights of the update before: a gradient is applied one update late. The first `DELAY_AFTER` updates
are not delayed. What is under way is waited for before weights are read, saved or loaded, and if the
training loop says so (`finish`), so that a training that goes on from a checkpoint delays the same updates.

With `training.clip_norm` the own parts' gradients are clipped on the host before the update, in the calling
thread also if the update is delayed: the norm is a collective, whose order all ranks share.

Left out of the paper: its own CPU kernel (PyTorch's fused AdamW takes the place of it), and the copy of one
layer's weights while the host updates the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trials.optim.adamw import DTYPES, adamw, moments
from trials.records.job import DELAY_AFTER, TrainingConfig
from trials.store.weights import Weights
from trials.training.checkpoint_files import FlatPieces
from trials.training.distributed.engine import DenseInputs
from trials.training.distributed.zero import Bucket, Zero
from trials.training.memory_limit import on_host

# The optimizer of ZeRO-Offload on the host: gradients that arrive, AdamW, and the weights that go back.
#
# Of each own part the host has fp32 masters, AdamW's moments, the updated weights as the model computes with
# them, and a place for gradients: as they arrive, and in fp32, if micro-batches are added up. What an
# accelerator copies from or to is page-locked. An update runs in the calling thread, or in a thread of its own
# while the next step goes on (the delayed parameter update of arXiv 2101.06840, section 5.2), whose gradients
# then need a second place. PyTorch's kernels let Python's other threads run meanwhile.


class _Gradient:
    """The place on the host for one part's gradient."""

    def __init__(self, length: int, arrives_in: torch.dtype, pinned: bool) -> None:
        self._arrived = torch.empty(length, dtype=arrives_in, pin_memory=pinned)
        self._sum = torch.empty(length)
        self._copied: torch.cuda.Event | None = None
        self._waiting = self._added = False

    def copy_from(self, part: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Begins to copy what has been reduced on a device; returns the event of its end on an accelerator."""
        self._add()
        self._waiting = True
        if stream is None:
            self._arrived.copy_(part)
            return None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._arrived.copy_(part, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(stream)
        return self._copied

    def so_far(self) -> Tensor:
        """Returns the sum of all that has arrived since the last `complete`, once it is there."""
        self._add()
        assert self._added
        return self._sum

    def complete(self) -> Tensor:
        """Returns `so_far`; what arrives next begins another sum."""
        gradient = self.so_far()
        self._added = False
        return gradient

    def _add(self) -> None:
        """Adds what has arrived to the sum; it begins the sum if nothing was added so far."""
        if not self._waiting:
            return
        if self._copied is not None:
            self._copied.synchronize()
        self._sum.add_(self._arrived) if self._added else self._sum.copy_(self._arrived)
        self._waiting, self._added = False, True


class HostOptimizer:
    """AdamW of one rank's parts, on the host."""

    def __init__(self, masters: Sequence[nn.Parameter], config: TrainingConfig, *, pinned: bool) -> None:
        """Takes fp32 masters in the host's memory.

        Args:
            masters: the own parts, one for each bucket.
            config: resolved settings of AdamW, of precision and of delay.
            pinned: whether an accelerator copies from and to this memory.
        """
        assert config.precision != "auto"
        self._masters = list(masters)
        self.settings = adamw(self._masters, config)
        """Settings of the next update, whose learning rate may be set while an update is under way; it has no
        state."""
        arrives_in = DTYPES[config.reduction_precision(config.precision)]
        with on_host():
            self.optimizer = adamw(self._masters, config)
            """What updates, and holds the moments."""
            for master in self._masters:
                moments(self.optimizer, master)
            self.outgoing = [
                torch.empty(len(master), dtype=DTYPES[config.precision], pin_memory=pinned)
                for master in self._masters
            ]
            """The weights after the last update, as the model computes with them."""
            self._places = [
                [_Gradient(len(master), arrives_in, pinned) for master in self._masters]
                for _ in range(2 if config.delayed_update else 1)
            ]
            """Places for gradients; those that arrive go into the first."""
        self.taken: torch.cuda.Event | None = None
        """What an accelerator records when it has copied all that goes back."""
        # AdamW asks the device for its state, and a thread begins with the first of the devices
        here = partial(torch.cuda.set_device, torch.cuda.current_device()) if pinned else None
        self._thread = ThreadPoolExecutor(1, "host-optimizer", initializer=here)
        self._under_way: Future[None] | None = None

    def take(self, index: int, part: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Begins to copy the gradient of a part to the host, on this stream of an accelerator."""
        return self._places[0][index].copy_from(part, stream)

    def gradients(self) -> Iterator[Tensor]:
        """Yields the own parts' gradients of the next update, once they have arrived; they may be changed in
        place."""
        return (gradient.so_far() for gradient in self._places[0])

    def step(self) -> None:
        """Updates the masters, in this thread, from what has arrived since the last update."""
        self._prepare()
        with on_host():
            self._update(self._places[0])

    def begin_step(self) -> None:
        """Does what `step` does, in the other thread, until `finish`."""
        self._prepare()
        self._places.reverse()
        self._under_way = self._thread.submit(self._update, self._places[-1])

    def finish(self) -> bool:
        """Waits for the update in the other thread; returns whether there was one."""
        if self._under_way is None:
            return False
        under_way, self._under_way = self._under_way, None
        under_way.result()
        return True

    @torch.no_grad()
    def cast(self) -> None:
        """Makes of the masters what goes back to the device."""
        for outgoing, master in zip(self.outgoing, self._masters, strict=True):
            outgoing.copy_(master)

    def _prepare(self) -> None:
        assert self._under_way is None
        groups = zip(self.settings.param_groups, self.optimizer.param_groups, strict=True)
        for settings, group in groups:
            group["lr"] = settings["lr"]

    @torch.no_grad()
    def _update(self, gradients: Sequence[_Gradient]) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient.complete()
        self.optimizer.step()
        if self.taken is not None:
            self.taken.synchronize()
        self.cast()


class ZeroOffload(Zero):
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
        super().__init__(
            model,
            config,
            process_group,
            keeps_gradients=False,
            bucket_bytes=0,
            where=where,
            masters_on_host=True,
        )
        self._config = config
        for buffer in model.buffers():
            buffer.data = buffer.to(where)
        self._indices = {id(bucket): index for index, bucket in enumerate(self.buckets)}
        on_accelerator = where.type == "cuda"
        self._host = HostOptimizer([b.master for b in self.buckets], config, pinned=on_accelerator)
        self.optimizer, self._updating = self._host.settings, self._host.optimizer
        self._stream = torch.cuda.Stream(where) if on_accelerator else None  # type: ignore[no-untyped-call]
        self._leaving: tuple[Tensor, torch.cuda.Event] | None = None
        self._updates = 0

    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B without gradients; every rank has all weights, so that nothing is sent."""
        self.finish()
        return super().predict(inputs)

    def accumulate_only(self, yes: bool) -> None:
        """Does nothing: gradients leave in every micro-batch, and the host adds them up."""

    def update(self) -> None:
        """Updates the own parts on the host and hands them out; with delay, begins to update, and hands out
        what the update before has made."""
        self._settle()
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
        return super().is_finite()

    def weights(self) -> Weights:
        """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective."""
        self.finish()
        return super().weights()

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the own parts of weights and moments, to save or to load into (`restored`); a collective."""
        self.finish()
        return super().state(saved)

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, and hands the weights out; a collective."""
        self.finish()
        self._updates = steps
        super().restored(steps)

    def _take(self, bucket: Bucket, part: Tensor) -> None:
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

    def _hand_out(self) -> None:
        """Hands out the masters as they are; nothing is under way on the host or to the device."""
        self._host.cast()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Copies updated weights to the device and hands them out."""
        for bucket, outgoing in zip(self.buckets, self._host.outgoing, strict=True):
            bucket.own.copy_(outgoing, non_blocking=True)
        if self._stream is not None:
            self._host.taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._host.taken.record()
        self._gather()
