"""DistributedDataParallel's all-reduce in another precision than that of the gradients.

torch has a hook for bf16 (`bf16_compress_hook`), which refuses gloo, though gloo adds bf16 up. This one goes on
every backend, and both ways. Where what is sent is smaller, it lies in the bucket itself: however many buckets are
on their way, no memory is held for them.

Sums are rounded to bf16 at each step of a ring, as in `fully_shard` with bf16 for its `reduce_dtype`. An
all-to-all and sums in fp32 would round only twice, but every rank of a host would send other hosts what a ring
sends once.
"""

# torch looks at a hook's annotations, which must not be postponed
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

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
