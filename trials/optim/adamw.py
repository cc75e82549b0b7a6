"""The dense part's optimizer, AdamW, and its state, to save it and to load into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trials.job import TrainingConfig
from trials.optim.bf16_adamw import Bf16AdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of the state that has a number for each weight."""


def adamw(parameters: list[nn.Parameter], config: TrainingConfig) -> Optimizer:
    """Returns AdamW of these weights, with its moments in `config.optimizer_precision`."""
    rates: dict[str, Any] = {"lr": config.dense_learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer_precision == "fp32":
        return AdamW(parameters, fused=True, **rates)
    return Bf16AdamW(parameters, **rates)


def moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns AdamW's two moments of a parameter, zeros before its first step; what is loaded into them counts."""
    state = _state(optimizer, parameter)
    return {moment: state[moment] for moment in MOMENTS}


def set_steps(optimizer: Optimizer, parameter: nn.Parameter, steps: int) -> None:
    """Sets the number of steps, after moments were loaded as they are after so many steps."""
    state = _state(optimizer, parameter)
    if isinstance(optimizer, Bf16AdamW):
        state["step"] = steps
    else:
        state["step"].fill_(steps)


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns a parameter's state as the first step would make it."""
    if isinstance(optimizer, Bf16AdamW):
        return optimizer.state_of(parameter)
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {moment: torch.zeros_like(parameter).detach() for moment in MOMENTS}
    return state
