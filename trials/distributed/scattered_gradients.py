"""Gradients on their way to their owners while backward goes on: one bucket after another is reduced and
scattered.

Hooks count the gradients of a bucket. When the last one has come, the bucket is averaged and scattered, and what
arrives of the own part is given to the engine that asked for it. No more than one bucket is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from trials.distributed.buckets import Bucket, Group, when_accumulated


class ScatteredGradients:
    """Reduces the gradients of buckets behind backward."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: Group,
        sent_in: torch.dtype,
        take: Callable[[Bucket, Tensor], None],
    ) -> None:
        """Begins to watch the buckets' parameters.

        Args:
            buckets: the buckets, whose parameters have their final places.
            group: the ranks that share them; one rank sends nothing.
            sent_in: the precision in which gradients are sent.
            take: takes the averaged gradient of a bucket's own part, in `sent_in`; in a micro-batch each bucket
                comes once, the last one of the model first.
        """
        self.waits = False
        """Whether gradients stay where they are, because another micro-batch follows."""
        self._buckets, self._group, self._sent_in, self._take = buckets, group, sent_in, take
        self._on_its_way: tuple[Bucket, Tensor, Tensor, dist.Work] | None = None
        for bucket in buckets:
            for parameter in bucket.parameters:
                when_accumulated(parameter, partial(self._arrived, bucket))

    def send_all(self) -> None:
        """Reduces all buckets now, whose gradients have stayed, the last one of the model first."""
        for bucket in reversed(self._buckets):
            self._send(bucket)

    def settle(self) -> None:
        """Waits for the bucket that is on its way, and gives its part to the engine."""
        if self._on_its_way is None:
            return
        bucket, sent, part, work = self._on_its_way
        self._on_its_way = None
        work.wait()
        del sent, work  # gloo's work has a copy of what was sent
        with torch.no_grad():
            self._take(bucket, part)

    def _arrived(self, bucket: Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        if bucket.missing:
            return
        bucket.missing = len(bucket.parameters)
        if not self.waits:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Begins to reduce a bucket's gradients, once those of the bucket before have been reduced: no more than
        one bucket of whole gradients is on its way."""
        self.settle()
        sent = bucket.to_send(self._sent_in)
        if self._group.process_group is None:  # one rank owns all of it
            with torch.no_grad():
                return self._take(bucket, sent)
        part = sent.new_empty(len(bucket.master))
        work = dist.reduce_scatter_single(
            part, sent, op=dist.ReduceOp.AVG, group=self._group.process_group, async_op=True
        )
        assert work is not None
        self._on_its_way = bucket, sent, part, work
