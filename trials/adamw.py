"""AdamW's state, to save it and to load into it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW calls its state that has a number for each weight."""


def adamw_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of a parameter, as its first step would make it."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {moment: torch.zeros_like(parameter).detach() for moment in MOMENTS}
    return state
