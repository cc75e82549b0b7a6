"""Compiling is decided by its break-even."""

from __future__ import annotations

import pytest
from torch import nn

from trials.training.compile_layers import COMPILE_SECONDS_PER_LAYER, SPEEDUP, BreakEven, compile_if_it_pays


def test_pays_from_its_break_even_on() -> None:
    short = BreakEven(layers=4, step_seconds=0.01, steps_left=5_000)
    saved_per_step = 0.01 - 0.01 / SPEEDUP
    assert short.steps * saved_per_step == pytest.approx(4 * COMPILE_SECONDS_PER_LAYER)
    assert not short.pays
    assert "5,000 are left: not compiling" in short.sentence()
    long = BreakEven(layers=4, step_seconds=0.01, steps_left=int(short.steps) + 1)
    assert long.pays
    assert long.sentence().endswith("compiling the layers")


def test_not_without_layers_nor_on_a_cpu() -> None:
    assert not BreakEven(layers=0, step_seconds=1.0, steps_left=10**9).pays
    assert "not on a CPU" in compile_if_it_pays(nn.Linear(1, 1), 1.0, 10**9)
