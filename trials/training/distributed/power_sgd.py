"""PowerSGD (arXiv 1905.13727): gradients of matrices are sent as products of two narrow ones, by torch's hook.

Of a gradient M (n x m) ranks add up P = M Q (n x r) and, with P made orthogonal, Q = M^T P (m x r), and take P Q^T
for its mean. What is lost on a rank is its residue, which is added to its next gradient. Q is the last step's.
Matrices that would save less than half, and vectors, are sent as they are.

The first steps send whole gradients. DistributedDataParallel makes its buckets anew once, which has happened by
then, so that residues, which torch keeps by bucket, stay those of their weights. In a checkpoint they lie in the
order of weights: `residue.R` of rank R, and `power_sgd_q`, which all ranks have alike. On as many ranks a training
goes on to the bit; on another number all begin with the mean of the residues.
"""

# torch looks at a hook's annotations, which must not be postponed
import logging
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trials.optim.one_bit_adam import MIN_COMPRESSION, LowRank
from trials.training.checkpoint_files import FlatPieces

LOG = logging.getLogger(__name__)
RESIDUE, Q = "residue.", "power_sgd_q"
WHOLE_GRADIENTS = 10
"""One of so many steps, at the beginning, averages whole gradients: an assumption, not measured."""
EPSILON = 1e-8
"""Number beside which a column has no length, as where no gradient reaches a matrix."""


class PowerSgd:
    """The compressed all-reduce of one rank's gradients."""

    def __init__(self, model: DistributedDataParallel, rank: int, steps: int, seed: int = 0) -> None:
        """Registers the hook of a model whose gradients lie in their buckets.

        Args:
            model: the wrapped model.
            rank: columns of P and Q.
            steps: steps of the whole training.
            seed: seed of the first Q, alike on all ranks.
        """
        self.steps, self._parameters = 0, [p for p in model.parameters() if p.requires_grad]
        self._group = model.process_group
        self._state = PowerSGDState(
            process_group=self._group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=max(2, steps // WHOLE_GRADIENTS),  # torch needs two
            min_compression_rate=MIN_COMPRESSION,
            orthogonalization_epsilon=EPSILON,
            random_seed=seed,
        )
        self._shapes = [(len(p), p.numel() // len(p)) for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        self._low_rank = [LowRank.of(n, m, rank) for n, m in self._shapes]
        self._place = {id(p): place for place, p in enumerate(self._parameters)}
        self._buckets: dict[int, list[int]] = {}
        """Places of the parameters of each bucket."""
        self._given: tuple[list[Tensor], list[Tensor]] | None = None
        """Residues and Q by parameter, as a checkpoint had them, for buckets that have not been reduced since."""
        self._loading: tuple[list[Tensor], Tensor, int] | None = None
        model.register_comm_hook(None, self._reduce)

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed by now."""
        return bool(self._state.error_dict) or self._given is not None

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that are reduced in a step, compressed and as they are."""
        sent = sum(one.sent for one in self._low_rank)
        size = self._parameters[0].element_size()
        return size * sent, size * sum(self._sizes)

    def _reduce(self, _: object, bucket: GradBucket) -> Future[Tensor]:
        index, places = bucket.index(), [self._place[id(p)] for p in bucket.parameters()]
        self._buckets[index] = places
        if self._state.iter == self._state.start_powerSGD_iter and not self.compresses:
            sent, whole = self.sent_bytes
            LOG.info(
                "PowerSGD compresses from step %d on: %s bytes are reduced per step, %s of gradients",
                self._state.iter + 1,
                f"{sent:,}",
                f"{whole:,}",
            )
        if self._given is not None and index not in self._state.error_dict:
            # the bucket gets what a checkpoint had of its parameters
            (residues, every_q), buffer = self._given, bucket.buffer()
            self._state.error_dict[index] = torch.cat([residues[place].to(buffer) for place in places])
            ordered = [every_q[place].to(buffer) for place in self._in_order_of_q(places)]
            self._state.q_memory_dict[index] = torch.cat(ordered) if ordered else buffer.new_empty(0)
            size = sum(self._low_rank[place].p for place in places)
            self._state.p_memory_dict[index] = buffer.new_empty(size)
        reduced: Future[Tensor] = powerSGD_hook(self._state, bucket)
        if bucket.buffer().device.type == "cpu":
            # gloo runs what follows a collective on its own threads, in which ranks would send in other orders
            reduced.wait()
        return reduced

    def _in_order_of_q(self, places: Sequence[int]) -> Iterator[int]:
        """Yields the places of matrices that are compressed as torch has their Q: those of one shape together."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for place in places:
            if self._low_rank[place].compressed:
                by_shape.setdefault(self._shapes[place], []).append(place)
        for together in by_shape.values():
            yield from together

    def state(self, saved: Collection[str] | None) -> dict[str, FlatPieces]:
        """Returns this rank's residue and Q, to save; with `saved`, what a checkpoint has under these names is
        loaded into them."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        if saved is None:
            if not self.compresses:
                return {}
            residues, every_q = self._held()
            return {
                f"{RESIDUE}{rank}": FlatPieces.whole(torch.cat(residues)),
                Q: FlatPieces.whole(torch.cat(every_q) if every_q else torch.zeros(1)),
            }
        writers = sum(name.startswith(RESIDUE) for name in saved)
        if not writers:
            return {}
        like = self._parameters[0].detach()
        mine = [rank] if writers == ranks else list(range(rank, writers, ranks))
        read = {one: like.new_zeros(sum(self._sizes)) for one in mine}
        q = like.new_zeros(max(1, sum(one.q for one in self._low_rank)))
        self._loading = [*read.values()], q, writers
        state = {f"{RESIDUE}{one}": FlatPieces.whole(values) for one, values in read.items()}
        return state | {Q: FlatPieces.whole(q)}

    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, as it was after so many steps; a collective."""
        self._state.iter = steps
        if self._loading is None:
            return
        (read, q, writers), self._loading = self._loading, None
        like, q_sizes = self._parameters[0].detach(), [one.q for one in self._low_rank]
        residue = torch.stack(read).sum(dim=0) if read else like.new_zeros(sum(self._sizes))
        if writers != dist.get_world_size(self._group):
            dist.all_reduce(residue, group=self._group)
            residue.div_(writers)
        self._given = list(torch.split(residue, self._sizes)), list(torch.split(q[: sum(q_sizes)], q_sizes))

    def _held(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns residues and Q by parameter."""
        if not self._state.error_dict:
            assert self._given is not None
            return self._given
        like = self._parameters[0].detach()
        residues = [like.new_zeros(size) for size in self._sizes]
        every_q = [like.new_zeros(one.q) for one in self._low_rank]
        for index, places in self._buckets.items():
            sizes = [self._sizes[place] for place in places]
            for place, values in zip(places, torch.split(self._state.error_dict[index], sizes), strict=True):
                residues[place] = values
            ordered = list(self._in_order_of_q(places))
            parts = torch.split(self._state.q_memory_dict[index], [self._low_rank[one].q for one in ordered])
            for place, values in zip(ordered, parts, strict=True):
                every_q[place] = values
        return residues, every_q


def lay_gradients_in_buckets(model: DistributedDataParallel) -> None:
    """Has all gradients lie in their buckets before the first step, as zeros; a collective.

    DistributedDataParallel puts gradients there when it first reduces them. Those of micro-batches before that
    would lie beside the buckets, as much memory once more than there is in later steps, also if a training goes
    on from a checkpoint and AdamW's moments are there. In one-bit Adam's second stage nothing is ever reduced. So
    a gradient of ones is reduced once. Buckets are made anew in the next forward, and stay from then on.
    """
    inner: nn.Module = model.module
    parameters = [p for p in inner.parameters() if p.requires_grad]
    inner.forward = lambda: torch.stack([p.sum() for p in parameters]).sum()
    try:
        model().backward()
    finally:
        del inner.forward
    torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
