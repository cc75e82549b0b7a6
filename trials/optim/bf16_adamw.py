"""AdamW (arXiv 1711.05101, algorithm 2) whose two moments are stored in bf16, rounded stochastically.

A moment changes by a share of 1 - beta a step, the second one by a thousandth; bf16 tells numbers apart that
differ by a 256th. Rounded to the nearest it would stay where it is for ever; rounded up with the probability
that makes its mean right it follows (arXiv 1502.02551). PyTorch's own kernel updates a chunk of numbers at a
time, from moments in fp32, so that no temporary is as long as the weights. Weights are fp32.

Random bits follow from PyTorch's seed when the optimizer was made and from the number of the step: replicas round
alike, and a training that is resumed goes on as it would have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNKS: dict[str, int] = {"cpu": 2**15, "cuda": 2**22}
"""Numbers that are updated at a time: as many as stay in a core's cache, or as keep a GPU busy. They are multiples
of 2^15, so that the ring of random bits comes out even."""
WORKSPACE_BYTES = 8
"""Bytes of workspace for each number of a chunk: its two moments in fp32."""
INT32_BYTES = 4
DROPPED_BITS = 16
"""Number of the bits of fp32 that bf16 does not have."""
DRAWS: int = 2**DROPPED_BITS
"""Number of values that the dropped bits may have."""


class Bf16AdamW(Optimizer):
    """AdamW of fp32 weights, whole or sharded, with bf16 moments."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Takes the arguments of `torch.optim.AdamW`."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._seed = torch.initial_seed()

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every weight that has a gradient; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, index, group)
        return None

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Returns a parameter's state, as its first step would make it; `step` is a number, not a tensor."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16).detach()
        return state

    def _update(self, parameter: Tensor, index: int, group: dict[str, Any]) -> None:
        state = self.state_of(parameter)
        state["step"] += 1
        assert parameter.grad is not None
        tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        flat = [_local(tensor).view(-1) for tensor in tensors]
        device = flat[0].device
        chunk = CHUNKS[device.type]
        workspace = torch.empty(2 * min(chunk, len(flat[0])), device=device)
        step = torch.full((), state["step"], dtype=torch.float32, device=device)
        draws = random.Random(hash((self._seed, state["step"], index)))
        for numbers in zip(*(torch.split(tensor, chunk) for tensor in flat), strict=True):
            _update_chunk(numbers, workspace, step, group, draws)


def _update_chunk(
    numbers: tuple[Tensor, ...],
    workspace: Tensor,
    step: Tensor,
    group: dict[str, Any],
    draws: random.Random,
) -> None:
    """Updates in place; `numbers` are weights, their gradients and their moments, each (N)."""
    weight_N, gradient_N, mean_N, square_N = numbers
    exact = workspace[: 2 * len(weight_N)]
    exact_mean_N, exact_square_N = exact.view(2, -1)
    exact_mean_N.copy_(mean_N)
    exact_square_N.copy_(square_N)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [weight_N],
        [gradient_N],
        [exact_mean_N],
        [exact_square_N],
        [],
        [step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    mean_bits_N, square_bits_N = round_to_bf16(exact, draws).view(2, -1)
    mean_N.view(torch.int16).copy_(mean_bits_N)
    square_N.view(torch.int16).copy_(square_bits_N)


def round_to_bf16(x_N: Tensor, draws: random.Random) -> Tensor:
    """Rounds fp32 (N), which is overwritten, to int32 (N), whose lower halves are the bits of bf16 numbers.

    Each result is one of the two neighbours of a number, so that the mean stays: a random number added to the
    bits that bf16 drops carries over as often as they are large. Larger bits are larger magnitudes, whatever the
    sign.
    """
    bits_N = x_N.view(torch.int32)
    return bits_N.add_(random_bits(len(bits_N), bits_N.device, draws)).bitwise_right_shift_(DROPPED_BITS)


def random_bits(count: int, device: torch.device, draws: random.Random) -> Tensor:
    """Returns int32 of (count), uniform in [0, DRAWS): from a place in a ring of random bits that is drawn anew
    every time.

    PyTorch's CPU generator takes as long for a number as the whole update.
    """
    start = draws.randrange(DRAWS)
    return _ring(device)[start : start + count]


@cache
def _ring(device: torch.device) -> Tensor:
    """Returns every value equally often, always in the same order; long enough from any place for a chunk's two
    moments."""
    values = torch.randperm(DRAWS, generator=torch.Generator().manual_seed(DRAWS), dtype=torch.int32)
    return values.repeat(ring_bytes(device.type) // values.nbytes).to(device)


def ring_bytes(device: str) -> int:
    """Returns the bytes that the random bits take, on `cpu` or `cuda`."""
    return INT32_BYTES * (DRAWS + 2 * CHUNKS[device])


def _local(tensor: Tensor) -> Tensor:
    # DTensors have this method; their package takes a second to import, which every command would wait for
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
