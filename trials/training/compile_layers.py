"""Finds out whether compiling a model's repeated layers pays for the steps that are left, and compiles them where
it does.

Decided after a few steps of the real training, whose time is the one number that cannot be known before.
On a CPU it never pays: compiled layers took as long as eager ones or up to five times as long, and 10 to 40
seconds to compile (docs/log.md, 2026-11-21).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

CALIBRATION_STEPS = 50
"""Number of eager steps after which is decided; the first ones, which also warm up, are part of the mean."""
COMPILE_SECONDS_PER_LAYER = 4.0
"""Seconds to compile forward and backward of one DHEN layer: 2 to 5 s, and 8.7 s for four and 7.4 s for eight
layers, which are alike (an H100 beside a Xeon of 16 cores, 2026-11-26)."""
SPEEDUP = 1.3
"""Ratio of eager to compiled step time on an accelerator: 1.55 to 1.6 with layers of 1,024 and 32,768 examples or
more, 0.9 to 1.3 where the host's starting of operations takes longest (an H100, 2026-11-26)."""


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """What compiling costs and saves."""

    layers: int
    """Number of layers that would be compiled."""
    step_seconds: float
    """Seconds of an eager step."""
    steps_left: int

    @property
    def compile_seconds(self) -> float:
        """Seconds until all layers are compiled."""
        return COMPILE_SECONDS_PER_LAYER * self.layers

    @property
    def steps(self) -> float:
        """Number of steps from which on compiling has paid."""
        return self.compile_seconds / (self.step_seconds * (1.0 - 1.0 / SPEEDUP))

    @property
    def pays(self) -> bool:
        """Whether training lasts that long."""
        return self.layers > 0 and self.steps_left > self.steps

    def sentence(self) -> str:
        """Says for people what was decided and why."""
        verdict = "compiling the layers" if self.pays else "not compiling"
        return (
            f"torch.compile: about {self.compile_seconds:,.0f} s to compile, paid back after {self.steps:,.0f} "
            f"steps of {1000 * self.step_seconds:.1f} ms; {self.steps_left:,} are left: {verdict}"
        )


def compile_if_it_pays(model: nn.Module, step_seconds: float, steps_left: int) -> str:
    """Compiles the model's layers in place where that pays; says what was decided and why."""
    if next(model.parameters()).device.type == "cpu":
        return "torch.compile: not on a CPU, where it gained nothing"
    layers = getattr(model, "layers", nn.ModuleList())
    break_even = BreakEven(layers=len(layers), step_seconds=step_seconds, steps_left=steps_left)
    if break_even.pays:
        torch._dynamo.config.suppress_errors = True  # a layer that cannot be compiled goes on eagerly
        for layer in layers:
            layer.compile(dynamic=False)
    return break_even.sentence()
