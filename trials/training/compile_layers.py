"""Finds out whether compiling a model's repeated layers pays for the steps that are left, and compiles them if
it does and if they give the same gradients.

Decided after a few steps of the real training, whose time is the one number that cannot be known before. The next
batch goes through each layer both ways: PyTorch 2.11 compiled layers whose MLPs got no gradients, and the network
trained on, to an NE that was 12 % higher (docs/log.md, 2026-11-27).
On a CPU it never pays: compiled layers took as long as eager ones or up to five times as long, and 10 to 40
seconds to compile (docs/log.md, 2026-11-21).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LOG = logging.getLogger(__name__)

CALIBRATION_STEPS = 50
"""Number of eager steps after which is decided; the first ones, which also warm up, are part of the mean."""
COMPILE_SECONDS_PER_LAYER = 4.0
"""Seconds to compile forward and backward of one DHEN layer: 2 to 5 s, and 8.7 s for four and 7.4 s for eight
layers, which are alike (an H100 beside a Xeon of 16 cores, 2026-11-26)."""
SPEEDUP = 1.3
"""Ratio of eager to compiled step time on an accelerator, an assumption. PyTorch 2.11, which lost gradients, had
1.55 to 1.6 with layers of 1,024 and 32,768 examples or more, 0.9 to 1.3 if the host's starting of operations
takes longest (an H100, 2026-11-26)."""
LEAST_COSINE = 0.9
"""Between what comes of a compiled layer and of the layer itself, which rounding tells apart; gradients that go
astray have 0."""
MOST_TIMES = 1.25
"""As long as the other may one of the two be."""
SMALL_SHARE = 1e-3
"""Of the length of all gradients of a layer together; shorter ones may be noise."""
COMPARED_ROWS = 1024
"""Rows of what a layer puts out, and of its inputs' gradients, that are compared: all of them would take much
memory."""


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
    """Has the model's layers compiled in place, with the next batch, if that pays; says what was decided and
    why."""
    if next(model.parameters()).device.type == "cpu":
        return "torch.compile: not on a CPU, where it gained nothing"
    layers = getattr(model, "layers", nn.ModuleList())
    break_even = BreakEven(layers=len(layers), step_seconds=step_seconds, steps_left=steps_left)
    if break_even.pays:
        compile_checked(layers)
    return break_even.sentence()


def compile_checked(layers: Iterable[nn.Module]) -> None:
    """Has each layer compiled when its next inputs come, and left as it is if its gradients are others then."""
    torch._dynamo.config.suppress_errors = True  # a layer that cannot be compiled goes on eagerly
    for number, layer in enumerate(layers):
        _CompileOnce(layer, number)


class _CompileOnce:
    """Compiles a layer as the first batch reaches it."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        self._number, self._hook = number, layer.register_forward_pre_hook(self)

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not (layer.training and torch.is_grad_enabled()):
            return  # an evaluation
        self._hook.remove()
        buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        where = inputs[0].device
        try:
            # training draws what it would have
            with torch.random.fork_rng([where] if where.type == "cuda" else []):
                eager = _results(layer, inputs)
                with torch._inductor.config.patch(fallback_random=True):  # dropout has the same masks
                    layer.compile(dynamic=False)
                    astray = _astray(eager, _results(layer, inputs))
        except Exception as error:  # whatever it is, the layer itself has trained so far
            astray = f"{type(error).__name__}: {error}"
        for name, buffer in layer.named_buffers():
            buffer.copy_(buffers[name])
        if astray is None:
            # evaluations go through the layer itself: other numbers of rows would be compiled for anew, unchecked
            compiled: Callable[..., Tensor] | None = layer._compiled_call_impl
            itself: Callable[..., Tensor] = layer._call_impl
            assert compiled is not None
            layer._compiled_call_impl = lambda *inputs: (compiled if layer.training else itself)(*inputs)
        else:
            layer._compiled_call_impl = None
            LOG.warning("layer %d is not compiled, for it would not be the same (%s)", self._number, astray)


def _results(layer: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Returns what a layer puts out, and gradients by what they are of, for one gradient of the outputs and the
    same random numbers."""
    torch.manual_seed(0)
    x, *others = (each.detach() for each in inputs)
    weights = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    named = {"inputs": x.requires_grad_()} | weights
    y: Tensor = layer(x, *(each.clone() for each in others))
    torch.manual_seed(0)
    found = torch.autograd.grad(y, list(named.values()), torch.randn_like(y), allow_unused=True)
    results = {
        name: torch.zeros_like(named[name]) if each is None else each.detach()
        for name, each in zip(named, found, strict=True)
    }
    results["inputs"] = results["inputs"][:COMPARED_ROWS].clone()
    return results | {"outputs": y.detach()[:COMPARED_ROWS].clone()}


def _astray(eager: dict[str, Tensor], compiled: dict[str, Tensor]) -> str | None:
    """Says what is another, and by how much; None if nothing is."""
    lengths = {name: float(each.float().norm()) for name, each in eager.items()}
    small = SMALL_SHARE * sum(length**2 for name, length in lengths.items() if name != "outputs") ** 0.5
    for name, length in lengths.items():
        other, least = compiled[name].float(), max(small, torch.finfo(torch.float32).tiny)
        if length <= least and float(other.norm()) <= MOST_TIMES * least:
            continue
        times = float(other.norm()) / max(length, least)
        cosine = float(torch.cosine_similarity(eager[name].float().flatten(), other.flatten(), dim=0))
        if not (cosine >= LEAST_COSINE and 1 / MOST_TIMES <= times <= MOST_TIMES):
            what = name if name == "outputs" else f"the gradient of {name}"
            return f"{what} is {times:.2f} times as long, with a cosine of {cosine:.2f}"
    return None
