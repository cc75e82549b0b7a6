"""Compiling is decided by its break-even, and by gradients that are the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dhen.config import LayerConfig
from dhen.dhen_model import DhenLayer, LayerShape
from dhen.values import parse
from trials.training.compile_layers import (
    COMPILE_SECONDS_PER_LAYER,
    SPEEDUP,
    BreakEven,
    compile_checked,
    compile_if_it_pays,
)

SHAPE = LayerShape(embeddings=4, dim=8, numeric=2)
INPUTS = torch.randn(64, 4, 8, requires_grad=True), torch.randn(64, 2)


def layer(*modules: str) -> DhenLayer:
    torch.manual_seed(0)
    settings = {"modules": list(modules), "ensemble": "sum", "out_embeddings": 4}
    return DhenLayer(parse(LayerConfig, settings, "test"), SHAPE, dropout=0.0)


def gradients(made: nn.Module) -> list[Tensor]:
    torch.manual_seed(2)
    y = made(*INPUTS)
    found = torch.autograd.grad(y.square().sum(), list(made.parameters()), allow_unused=True)
    return [torch.zeros(1) if each is None else each for each in found]


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for an accelerator, and run by PyTorch's own kernels: no compiler takes half a minute."""
    torch.compiler.reset()
    whole = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: whole(self, backend="aot_eager", **how))


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


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kinds", [("attention", "dlrm"), ("dcn_v2", "mlp")], ids=str)
def test_compiled_layers_have_the_same_gradients_and_evaluations_go_through_the_layer_itself(
    kinds: tuple[str, ...],
) -> None:
    made = layer(*kinds)
    eager = gradients(made)
    compile_checked(nn.ModuleList([made]))
    made(*INPUTS)
    assert made._compiled_call_impl is not None
    for mine, theirs in zip(gradients(made), eager, strict=True):
        torch.testing.assert_close(mine, theirs)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    made.eval()
    with torch.no_grad():
        made(INPUTS[0][:7], INPUTS[1][:7])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    made.train()
    made(*INPUTS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("without_inductor")
def test_training_draws_what_it_would_have_and_no_gradient_is_left() -> None:
    made = layer("mlp", "dlrm")
    compile_checked(nn.ModuleList([made]))
    torch.manual_seed(1)
    made(*INPUTS)
    assert made._compiled_call_impl is not None
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert all(parameter.grad is None for parameter in made.parameters())


@pytest.mark.parametrize("wrong", ["none", "turned", "long", "nan"])
def test_a_layer_whose_gradients_go_astray_stays_as_it_is(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch 2.11 compiled MLPs so."""

    class Astray(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            factor = {"none": 0.0, "turned": -1.0, "long": 3.0, "nan": float("nan")}[wrong]
            return gradient * factor

    def compiled(self: nn.Module, **how: object) -> None:
        self._compiled_call_impl = lambda *inputs: Astray.apply(self.forward(*inputs))

    monkeypatch.setattr(nn.Module, "compile", compiled)
    made = layer("mlp", "linear")
    eager = gradients(made)
    compile_checked(nn.ModuleList([made]))
    made.eval()
    made(*INPUTS)
    assert not caplog.messages, "an evaluation decides nothing"
    made.train()
    with caplog.at_level(logging.WARNING):
        made(*INPUTS)
    assert made._compiled_call_impl is None
    assert "layer 0 is not compiled, for it would not be the same (the gradient of " in caplog.text
    for mine, theirs in zip(gradients(made), eager, strict=True):
        assert torch.equal(mine, theirs)


def test_a_layer_whose_compiling_ends_with_an_error_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(self: nn.Module, **how: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(nn.Module, "compile", out_of_memory)
    made = layer("mlp", "linear")
    eager = gradients(made)
    compile_checked(nn.ModuleList([made]))
    with caplog.at_level(logging.WARNING):
        for mine, theirs in zip(gradients(made), eager, strict=True):
            assert torch.equal(mine, theirs)
    assert "(OutOfMemoryError: tried to allocate 2.00 GiB)" in caplog.text
