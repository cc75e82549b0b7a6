"""One-bit Adam (arXiv 2102.02888, algorithm 1): AdamW while the variance changes, then momentum in one bit per
number.

First stage: AdamW of gradients averaged over ranks, until the variance is steady. Every so many (`lag_of`)
steps the L1 norm of the variance, corrected for its start at zero, is held against the one a lag before; where the
smaller is at least `VARIANCE_RATIO` of the larger, the stage ends. The paper's rule has the same ratio of
norms as they are, over a lag of 1 / (1 - beta2) steps: uncorrected norms grow from zero, and would not be steady
before some 4,000 steps, more than most trainings here have.

Second stage: the variance stays as it is, Adam is linear in the gradient, and ranks no longer average gradients.
Each adds its own to the momentum that all share, and an all-reduce of one bit per number with error feedback
(`trials.optim.compressed_all_reduce`) makes the next momentum of them.

Other than in the paper, what is compressed is the momentum divided by the root of the variance, number by number.
It is the same momentum in units that do not differ between numbers: a scale fits a whole block of them, and a
weight whose gradients are a thousand times smaller than its neighbours' gets steps like theirs and not a thousand
times as large ones. (DeepSpeed leaves such weights to masks that users write.) A root that is less than
`LEAST_ROOT` of its tensor's mean counts as that much: a unit that was dead in the first stage may come to life in
the second. In a tensor that had no gradient at all it counts as the mean of all weights.

A worker's vector, one for both, is what it has of the momentum and of its residue: beta1 times the one plus the
other.

Shapes: N dense weights, one after another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from trials.job import TrainingConfig
from trials.optim.compressed_all_reduce import CompressedAllReduce

LOG = logging.getLogger(__name__)
VARIANCE_RATIO = 0.96
"""Ratio of the variance's L1 norms at two looks, the smaller to the larger, from which on it counts as steady
(arXiv 2102.02888)."""
LONGEST_LAG, LOOKS = 1000, 20
"""Most steps between two looks at the variance, 1 / (1 - beta2) as in arXiv 2102.02888, and number of looks in a
training of fewer steps than that allows: it may then be steady after a tenth of them."""
LEAST_ROOT = 0.1
"""Least root of a variance, as a share of the mean root in its tensor."""


class SecondStage:
    """The steps of one-bit Adam with a variance that no longer changes."""

    def __init__(
        self,
        weight_N: Tensor,
        carried_N: Tensor,
        root_N: Tensor,
        betas: tuple[float, float],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Takes tensors over, which every rank has whole.

        Args:
            weight_N: fp32 weights, which steps update.
            carried_N: beta1 times the momentum, in units of the roots, and what this rank has lost.
            root_N: roots of the variance, corrected for its start at zero.
            betas: AdamW's.
            group: the ranks; None for one.
        """
        self.weight_N, self.carried_N, self.root_N = weight_N, carried_N, root_N
        self._betas, self._group = betas, group
        self.all_reduce = CompressedAllReduce(len(carried_N), group, carried_N.device)

    @torch.no_grad()
    def step(self, gradient_N: Tensor, number: int, lr: float, weight_decay: float) -> None:
        """Makes the step of this number from this rank's own gradient, of its share of the batch; a collective."""
        beta1 = self._betas[0]
        self.carried_N.addcdiv_(gradient_N, self.root_N, value=1 - beta1)
        self.weight_N.mul_(1 - lr * weight_decay)
        size = lr / (1 - beta1**number)
        for place, momentum in self.all_reduce(self.carried_N):
            self.weight_N[place].sub_(momentum, alpha=size)
            self.carried_N[place].add_(momentum, alpha=beta1)

    @torch.no_grad()
    def moments(self, steps: int) -> dict[str, Tensor]:
        """Returns a copy of AdamW's two moments, as if AdamW had come here in so many steps; a collective."""
        beta1, beta2 = self._betas
        momentum_N = self.carried_N.clone()
        if self._group is not None:
            dist.all_reduce(momentum_N, group=self._group)
            momentum_N /= dist.get_world_size(self._group)
        return {
            "exp_avg": momentum_N.mul_(self.root_N).div_(beta1),
            "exp_avg_sq": self.root_N.square().mul_(1 - beta2**steps),
        }


def lag_of(config: TrainingConfig, total_examples: int) -> int:
    """Returns the steps between two looks at the variance, for so many examples of all passes: the second look is
    not before the end of the learning rates' warm-up."""
    assert config.batch_size is not None
    warmup = math.ceil((config.warmup_examples or config.warmup_share * total_examples) / config.batch_size)
    return max(1, min(LONGEST_LAG, total_examples // config.batch_size // LOOKS), math.ceil(warmup / 2))


class OneBitAdam(AdamW):
    """One-bit Adam of the dense weights as one vector, or of this rank's part of it in the first stage."""

    def __init__(
        self,
        parameter: nn.Parameter,
        config: TrainingConfig,
        group: dist.ProcessGroup | None,
        sizes: Sequence[int],
        total_examples: int,
        *,
        is_part: bool = False,
    ) -> None:
        """Takes the weights over.

        Args:
            parameter: fp32 weights, (N) or a part of them that pads to equal parts.
            config: resolved settings.
            group: the ranks that train together; None for one.
            sizes: numbers of each dense tensor, in the vector's order.
            total_examples: those of all passes.
            is_part: whether ranks have equal parts of the vector.
        """
        lr, decay = config.dense_learning_rate, config.weight_decay
        super().__init__([parameter], lr=lr, weight_decay=decay, fused=True)
        self._parameter, self.group, self._sizes, self._is_part = parameter, group, sizes, is_part
        self._lag = lag_of(config, total_examples)
        self.steps = 0
        """Number of steps so far."""
        self.looked_at = torch.zeros(2, dtype=torch.float64)
        """Step after which the variance was last looked at, and the norm that it had."""
        self.second_stage: SecondStage | None = None
        """The second stage, once it has begun."""
        self.carried_by_others: tuple[list[Tensor], int] | None = None
        """What this rank is to read of a checkpoint of another number of ranks, and that number, until it is
        read."""

    @property
    def compresses(self) -> bool:
        """Whether the second stage has begun, in which gradients stay each rank's own."""
        return self.second_stage is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes a step from the parameter's gradient: in the first stage averaged over ranks, in the second this
        rank's own."""
        assert closure is None
        if self.second_stage is not None:
            assert self._parameter.grad is not None
            return self.step_of_second_stage(self._parameter.grad)
        self.steps += 1
        super().step()

    def step_of_second_stage(self, gradient_N: Tensor) -> None:
        """Makes a step from this rank's own gradient; a collective."""
        assert self.second_stage is not None
        self.steps += 1
        (settings,) = self.param_groups
        self.second_stage.step(gradient_N, self.steps, settings["lr"], settings["weight_decay"])

    def is_steady(self) -> bool:
        """Tells, after a step of the first stage, whether it is the last one; the same on all ranks."""
        if self.steps % self._lag:
            return False
        variance = self.state[self._parameter]["exp_avg_sq"]
        norm = variance.sum(dtype=torch.float64)
        if self.group is not None:
            if self._is_part:
                dist.all_reduce(norm, group=self.group)
            else:  # alike on all ranks but for what their devices make of it
                dist.broadcast(norm, group=self.group, group_src=0)
        beta2 = self.param_groups[0]["betas"][1]
        now = norm.item() / (1 - beta2**self.steps)
        before, self.looked_at[0], self.looked_at[1] = float(self.looked_at[1]), self.steps, now
        return bool(0 < VARIANCE_RATIO * max(before, now) <= min(before, now))

    @torch.no_grad()
    def freeze(self, weight_N: Tensor, momentum_N: Tensor, variance_N: Tensor) -> None:
        """Begins the second stage with whole vectors, which it overwrites and keeps."""
        beta1, beta2 = self.param_groups[0]["betas"]
        root_N = variance_N.div_(1 - beta2**self.steps).sqrt_()
        mean = root_N.mean()
        for roots in torch.split(root_N, list(self._sizes)):
            of_tensor = roots.mean()
            roots.clamp_(min=torch.where(of_tensor > 0, LEAST_ROOT * of_tensor, mean))
        root_N.add_(self.param_groups[0]["eps"])
        self.begin_second_stage(weight_N, momentum_N.div_(root_N).mul_(beta1), root_N)
        assert self.second_stage is not None
        layout = self.second_stage.all_reduce.layout
        LOG.info(
            "one-bit Adam compresses from step %d on: this rank sends %s bytes per step, where a ring would "
            "send %s of gradients in fp32",
            self.steps + 1,
            f"{layout.sent_bytes:,}",
            f"{round(2 * (layout.ranks - 1) / layout.ranks * 4 * layout.numbers):,}",
        )

    def begin_second_stage(self, weight_N: Tensor, carried_N: Tensor, root_N: Tensor) -> None:
        """Begins the second stage with tensors that have, or are about to be given, what they had after some
        step."""
        self.state.clear()
        betas = self.param_groups[0]["betas"]
        self.second_stage = SecondStage(weight_N, carried_N, root_N, betas, self.group)
