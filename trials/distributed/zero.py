"""ZeRO, stages 1 and 2 (arXiv 1910.02054): weights on every rank, optimizer state and gradients on their owners.

Weights lie in buckets (`trials.distributed.buckets`), of each of which every rank owns an equal part: it alone
has AdamW's moments of the part, and its fp32 master weights. Behind backward a bucket's gradients are averaged
and scattered to the owners of its parts, each owner updates its part, and an all-gather hands out what the
model computes with. That sends as much as plain data parallelism, whose all-reduce is a reduce-scatter and an
all-gather.

Stage 1 (zero1) has gradients of all weights on every rank, in buckets as large as those of
DistributedDataParallel, adds micro-batches up there, and reduces in the last one. Stage 2 (zero2) has a bucket
for each layer, reduces in every micro-batch, and frees whole gradients once a bucket is on its way: what stays is
the fp32 gradient of the own part.

In fp32 master weights need no memory: a rank's masters are its part of the weights that the model computes with.
In bf16 they are fp32 tensors of their own, as long as the part.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

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
from trials.distributed.scattered_gradients import ScatteredGradients
from trials.distributed.table_split import DenseInputs
from trials.job import TrainingConfig
from trials.optim.adamw import adamw, set_steps
from trials.optim.clip import Clip
from trials.optim.master_weights import DTYPES, all_finite, dense_parameters
from trials.storage.weights_file import Weights


class Zero:
    """The engine of zero1 and zero2."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        process_group: dist.ProcessGroup,
        *,
        keeps_gradients: bool,
        bucket_bytes: int,
    ) -> None:
        """Takes the weights of a model over, which is alike on all ranks.

        Args:
            model: its parameters become views of buckets.
            config: resolved settings of AdamW and precision.
            process_group: the ranks that share the state.
            keeps_gradients: True for stage 1, False for stage 2.
            bucket_bytes: bytes of gradients that stage 1 reduces at a time, at least.
        """
        assert config.precision != "auto"
        self.module, self._keeps_gradients = model, keeps_gradients
        self._group, self._names = Group.of(process_group), tuple(dense_parameters(model))
        dtype = DTYPES[config.precision]
        smallest = bucket_bytes if keeps_gradients else 0
        self.buckets = [
            Bucket(parameters, dtype, self._group)
            for parameters in bucket_parameters(model, dtype.itemsize, smallest)
        ]
        if keeps_gradients:
            for bucket in self.buckets:
                bucket.keep_gradients()
        sent_in = DTYPES[config.reduction_precision(config.precision)]
        self._gradients = ScatteredGradients(self.buckets, self._group, sent_in, _add_to_own)
        self.optimizer = adamw([bucket.master for bucket in self.buckets], config)
        self.clip = Clip(config.clip_norm, self._group.process_group)

    def predict(self, inputs: DenseInputs) -> Tensor:
        """Returns logit_B without gradients; every rank has all weights, so that nothing is sent."""
        with torch.no_grad():
            return self.module(inputs)  # type: ignore[no-any-return]

    def accumulate_only(self, yes: bool) -> None:
        """Sets whether another micro-batch follows, for which stage 1 waits."""
        self._gradients.waits = yes and self._keeps_gradients

    def reduce_all(self) -> None:
        """Reduces the gradients of stage 1, which have waited (`accumulate_only`), all at once."""
        assert self._keeps_gradients
        self._gradients.send_all()

    def update(self) -> None:
        """Updates the own parts, once the last bucket has been reduced, and hands them out."""
        self._gradients.settle()
        assert all(bucket.missing == len(bucket.parameters) for bucket in self.buckets)
        self.clip(bucket.master.grad for bucket in self.buckets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.forget_gradients()
        self._hand_out()

    def is_finite(self) -> bool:
        """Tells whether no weight of the own parts is NaN or infinite."""
        return all(all_finite(bucket.master) for bucket in self.buckets)

    def weights(self) -> Weights:
        """Returns a copy of all weights in fp32 on the first rank, nothing on others; a collective."""
        return whole_weights(self.module, self._names, self.buckets, self._group)

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the own parts of weights and moments, to save or to load into (`restored`)."""
        return own_state(self.buckets, self.optimizer)

    def clipped_ranges(self) -> list[list[tuple[int, int]]]:
        """Returns where the own part of each bucket lies in the vector of all weights, one range each."""
        starts = accumulate((bucket.length for bucket in self.buckets), initial=0)
        owned = zip(starts, self.buckets, strict=False)
        return [[(start + b.begin, start + b.begin + b.owned)] for start, b in owned]

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, and hands the weights out; a collective."""
        for bucket in self.buckets:
            set_steps(self.optimizer, bucket.master, steps)
        self._hand_out()

    @torch.no_grad()
    def _hand_out(self) -> None:
        """Gives every rank the weights that their owners have updated."""
        for bucket in self.buckets:
            if not bucket.computes_with_masters:
                bucket.own.copy_(bucket.master)
        hand_out(self.buckets, self._group)


def _add_to_own(bucket: Bucket, part: Tensor) -> None:
    """Adds what has arrived of a bucket to the own part's gradient."""
    gradient = bucket.master.grad
    bucket.master.grad = part.float() if gradient is None else gradient.add_(part)
