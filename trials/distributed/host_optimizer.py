"""The optimizer of ZeRO-Offload on the host: gradients that arrive, AdamW, and the weights that go back.

Of each own part the host has fp32 masters, AdamW's moments, the updated weights as the model computes with
them, and a place for gradients: as they arrive, and in fp32, where micro-batches are added up. What an
accelerator copies from or to is page-locked. An update runs in the calling thread, or in a thread of its own
while the next step goes on (the delayed parameter update of arXiv 2101.06840, section 5.2), whose gradients
then need a second place. PyTorch's kernels let Python's other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from trials.job import TrainingConfig
from trials.memory.limit import on_host
from trials.optim.adamw import adamw, moments
from trials.optim.master_weights import DTYPES


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
        """Adds what has arrived to the sum; it begins the sum where nothing was added so far."""
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
