"""One-bit Adam (`trials.optim.one_bit_adam`) in ZeRO's stage 1, and in checkpoints.

In its first stage it is ZeRO's stage 1 with all weights in one bucket: the compressed all-reduce that follows is
of one vector, cut in the same places under plain data parallelism. In its second stage every rank updates all
weights, by the momentum that it has received; owners that handed out weights would send sixteen bits or more of
each. So moments and fp32 masters are gathered when the second stage begins, and are whole from then on.

In a checkpoint the second stage has `carried.R`, the momentum with the residue of rank R as a worker, whole;
`root`, whole; and `server_residue`, of which each rank has a chunk. On as many ranks a training goes on to the
bit. On another number all ranks begin with the mean of what was carried, so that no gradient is lost or counted
twice.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trials.optim.adamw import moments
from trials.optim.one_bit_adam import OneBitAdam
from trials.planner.memory import ALL_IN_ONE
from trials.records.job import TrainingConfig
from trials.training.checkpoint_files import FlatPieces, Piece
from trials.training.distributed.zero import Zero

WEIGHT, CARRIED, ROOT, SERVER, LOOKS = "weight", "carried.", "root", "server_residue", "variance_looks"


class OneBitZero(Zero):
    """The engine of zero1 with one-bit Adam."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        process_group: dist.ProcessGroup,
        total_examples: int,
    ) -> None:
        """Takes the weights of a model over, which is alike on all ranks."""
        super().__init__(model, config, process_group, keeps_gradients=True, bucket_bytes=ALL_IN_ONE)
        (self._bucket,) = self.buckets
        sizes = [p.numel() for p in self._bucket.parameters]
        group = self._group.process_group
        self._one_bit = OneBitAdam(self._bucket.master, config, group, sizes, total_examples, is_part=True)
        self.optimizer = self._updating = self._one_bit
        self._masters = self._bucket.weights

    def accumulate_only(self, yes: bool) -> None:
        """Sets whether another micro-batch follows; in the second stage gradients stay in any case."""
        self._waits = yes or self._one_bit.compresses

    def update(self) -> None:
        """Updates the own part and hands it out; in the second stage updates all."""
        if not self._one_bit.compresses:
            super().update()
            if self._one_bit.is_steady():
                own = moments(self._one_bit, self._bucket.master).values()
                every = [self._gathered(values)[: self._bucket.length] for values in own]
                self._one_bit.freeze(self._whole_masters(), *every)
                self.clip.of_own_gradients(self._group.process_group)
            return
        bucket = self._bucket
        assert bucket.gradients is not None
        gradient_N = bucket.gradients[: bucket.length].float()
        self.clip([gradient_N])
        self._one_bit.step_of_second_stage(gradient_N)
        bucket.forget_gradients()
        self._publish()

    def state(self, saved: Collection[str] | None = None) -> dict[str, FlatPieces]:
        """Returns the own part of weights, with moments or the second stage's state, to save or to load into."""
        if begins_later(self._one_bit, saved):
            weight_N = self._whole_masters()
            self._one_bit.begin_second_stage(weight_N, torch.zeros_like(weight_N), torch.zeros_like(weight_N))
        more, bucket = one_bit_state(self._one_bit, saved), self._bucket
        if not self._one_bit.compresses:
            return more | super().state()
        piece = Piece(bucket.begin, bucket.master.detach()[: bucket.owned])
        return more | {WEIGHT: FlatPieces(bucket.length, (piece,) if bucket.owned else ())}

    @torch.no_grad()
    def restored(self, steps: int) -> None:
        """Takes over what was loaded into `state()`, and hands the weights out; a collective."""
        take_over(self._one_bit, steps)
        if not self._one_bit.compresses:
            return super().restored(steps)
        self.clip.of_own_gradients(self._group.process_group)
        dist.all_gather_single(self._masters, self._bucket.master, group=self._group.process_group)
        self._publish()

    def _whole_masters(self) -> Tensor:
        """Gives this rank all fp32 weights, of which its own part's masters become a view; a collective."""
        bucket = self._bucket
        if not bucket.computes_with_masters:
            self._masters = self._gathered(bucket.master.detach())
            bucket.master.data = self._masters.view(self._group.size, -1)[self._group.rank]
        return self._masters[: bucket.length]

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks, one after another; a collective."""
        whole = part.new_empty(self._group.size * len(part))
        dist.all_gather_single(whole, part, group=self._group.process_group)
        return whole

    def _publish(self) -> None:
        """Copies all weights to what the model computes with; in fp32 it computes with them."""
        if not self._bucket.computes_with_masters:
            self._bucket.weights.copy_(self._masters)


def begins_later(optimizer: OneBitAdam, saved: Collection[str] | None) -> bool:
    """Tells whether an optimizer has still to begin the second stage that a checkpoint with these names is in."""
    return saved is not None and ROOT in saved and not optimizer.compresses


def one_bit_state(optimizer: OneBitAdam, saved: Collection[str] | None) -> dict[str, FlatPieces]:
    """Returns what a rank has beside weights and moments, to save; with `saved`, to load what a checkpoint has
    under these names into."""
    looks = {LOOKS: FlatPieces.whole(optimizer.looked_at)}
    stage = optimizer.second_stage
    if stage is None:
        return looks
    group = optimizer.group
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    carried = {rank: stage.carried_N}
    writers = ranks if saved is None else sum(name.startswith(CARRIED) for name in saved)
    if writers != ranks:
        carried = {each: torch.zeros_like(stage.carried_N) for each in range(rank, writers, ranks)}
    optimizer.carried_by_others = None if writers == ranks else (list(carried.values()), writers)
    served = stage.all_reduce.served
    residue = (Piece(served.start, stage.all_reduce.residue),) if served.stop > served.start else ()
    return (
        looks
        | {f"{CARRIED}{each}": FlatPieces.whole(values) for each, values in carried.items()}
        | {ROOT: FlatPieces.whole(stage.root_N), SERVER: FlatPieces(len(stage.root_N), residue)}
    )


def take_over(optimizer: OneBitAdam, steps: int) -> None:
    """Takes over what was loaded into `one_bit_state`, as it was after so many steps; a collective."""
    optimizer.steps = steps
    if optimizer.carried_by_others is None:
        return
    (given, writers), stage = optimizer.carried_by_others, optimizer.second_stage
    optimizer.carried_by_others = None
    assert stage is not None
    stage.carried_N.zero_()
    for carried_N in given:
        stage.carried_N.add_(carried_N)
    if optimizer.group is not None:
        dist.all_reduce(stage.carried_N, group=optimizer.group)
    stage.carried_N.div_(writers)
