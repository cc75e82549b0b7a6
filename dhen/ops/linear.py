"""Linear maps with ReLU and dropout in one: one tensor kept for backward where PyTorch's operations keep three.

For the backward pass of ReLU and dropout together the output is enough. On a CPU in bf16 bias and ReLU are
part of the matmul too (oneDNN), where torch's own linear copies the bias into its output first and leaves
ReLU to another pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dhen.ops.norm import dropout_scale, keep_mask, where_kept, where_positive
from dhen.ops.split import How, ParameterSplit, RankGroup, apart, gathered, keep_part
from dhen.tape import MASK_BYTES, NOTHING, Shape, Tape

# Backward in two passes: which gradients an operation of our own has to compute in the running one.
#
# Under a zero-bubble schedule (arXiv 2401.10241) a stage's backward comes as a pass for its inputs and one for
# its weights. PyTorch's own operations ask autograd which of their gradients the running pass is for; an
# operation in Python is asked for all of them in both passes, unless it asks here.

Pass = Literal["full", "input", "weight"]
"""Names as `torch.distributed.pipelining` has them."""
_running: Pass = "full"


@contextmanager
def running(backward: Pass) -> Iterator[None]:
    """Says which pass runs inside; autograd's threads of all devices see it."""
    global _running
    before, _running = _running, backward
    try:
        yield
    finally:
        _running = before


def wanted(ctx: Any) -> tuple[bool, ...]:
    """Returns which inputs' gradients are wanted: `ctx.needs_input_grad` of an operation whose tensors come first
    among its arguments, less those that the running pass is not for."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if _running == "full":
        return needs
    edges = (*ctx.next_functions, *[(None, 0)] * len(needs))  # one for each argument that is a tensor
    found = []
    for need, (node, _) in zip(needs, edges, strict=False):
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            found.append(need and _running == "weight")
        else:
            found.append(need and node is not None and bool(torch._C._will_engine_execute_node(node)))
    return tuple(found)


FUSED_ON_CPU = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
"""Whether oneDNN multiplies in bf16 here: this PyTorch was built with it, and the CPU has AVX-512 or better."""


class LinearSplit(NamedTuple):
    """The ranks over which a linear map is split, and how: one by columns takes whole inputs, one by rows its part
    of them, as the one before put them out."""

    group: RankGroup
    how: How


class Linear(nn.Linear):
    """dropout(act(W x + b)): (..., n_in) -> (..., n_out); act is ReLU or nothing."""

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool = True, relu: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(n_in, n_out, bias)
        self.relu, self.p = relu, dropout
        self.over: LinearSplit | None = None

    def split(self, how: How | None, group: RankGroup, *, blocks: int = 1) -> None:
        """Keeps this rank's part of the map, or all of it (None); of outputs in `blocks` a part of each."""
        if how is None:
            return
        self.over = LinearSplit(group, how)
        keep_part(self, "weight", ParameterSplit(1) if how == "rows" else ParameterSplit(0, blocks), group)
        if how != "rows" and self.bias is not None:
            keep_part(self, "bias", ParameterSplit(0, blocks), group)

    def forward(self, input: Tensor) -> Tensor:
        """Without dropout in evaluation."""
        p = self.p if self.training else 0.0
        return linear(input, self.weight, self.bias, relu=self.relu, p=p, over=self.over)

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"{super().extra_repr()}, relu={self.relu}, dropout={self.p}"


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    relu: bool = False,
    p: float = 0.0,
    over: LinearSplit | None = None,
) -> Tensor:
    """dropout(act(W x + b)) with dropout probability p: (..., n_in) -> (..., n_out).

    Or K maps in one batched product, weight of (K, n_out, n_in): (K, N, n_in) -> (K, N, n_out).

    On the CPU dropout's scale is applied to weight and bias, which are fewer than the outputs; ReLU lets it
    through.
    """
    if p and x.device.type == "cpu":
        weight, bias = weight * dropout_scale(p), bias if bias is None else bias * dropout_scale(p)
    if weight.dim() == 3:
        return _Linear.apply(x, weight, bias, relu, p, None)  # type: ignore[no-untyped-call, no-any-return]
    y_NV: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias, relu, p, over)  # type: ignore[no-untyped-call]
    y = y_NV.view(*x.shape[:-1], len(weight))
    return gathered(y, over.group) if over is not None and over.how == "gathered" else y


class _Linear(torch.autograd.Function):
    """x of (N, n_in), weight of (n_out, n_in); or K of both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        relu: bool,
        p: float,
        over: LinearSplit | None,
    ) -> Tensor:
        if over is None:
            y, keep = _drop(_product(x, weight, bias, relu), p)
        elif over.how == "rows":
            y, keep = _drop(_summed_product(x, weight, bias, relu, over.group), p)
        else:
            with apart(over.group, x.device) if p else nullcontext():
                y, keep = _drop(_product(x, weight, bias, relu), p)
        ctx.relu, ctx.scale = relu, 1.0 if x.device.type == "cpu" else 1.0 / (1.0 - p)
        ctx.group = over.group if over is not None and over.how != "rows" else None
        ctx.save_for_backward(x, weight, y if relu else keep)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, passed = ctx.saved_tensors
        if passed is not None:
            # the gradient before dropout and ReLU, from the output (with ReLU) or dropout's mask
            if gradient.device.type == "cpu":
                gradient = (where_positive if ctx.relu else where_kept)(passed, gradient)
            else:
                gradient = torch.where(passed > 0 if ctx.relu else passed, gradient * ctx.scale, 0.0)
        by_x, by_weight, by_bias, *_ = wanted(ctx)
        gradient_x = gradient @ weight if by_x else None
        if gradient_x is not None and ctx.group is not None:
            ctx.group.sum_(gradient_x)
        return (
            gradient_x,
            gradient.mT @ x if by_weight else None,
            gradient.sum(-2) if by_bias else None,
            None,
            None,
            None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    if weight.dim() == 3:
        assert bias is not None
        y = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        return y.relu_() if relu else y
    if FUSED_ON_CPU and x.device.type == "cpu" and x.dtype is torch.bfloat16:
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight, bias, "relu" if relu else "none", [], ""
        )
        return fused
    y = F.linear(x, weight, bias)
    return y.relu_() if relu else y


def _summed_product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool, group: RankGroup) -> Tensor:
    """Each rank multiplies its part of the inputs; what follows is done by all, with the sum."""
    y = _product(x, weight, None, False)
    group.sum_(y)
    if bias is not None:
        y += bias
    return y.relu_() if relu else y


def _drop(y: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """What dropout leaves, and its mask; accelerators draw masks in parallel and have PyTorch's kernel."""
    if not p:
        return y, None
    if y.device.type != "cpu":
        return torch.native_dropout(y, p, True)
    keep = keep_mask(y, p)
    return where_kept(keep, y), keep


def linear_tape(
    tape: Tape,
    x: int,
    n_in: int,
    n_out: int,
    *,
    positions: int = 1,
    bias: bool = True,
    relu: bool = False,
    p: float = 0.0,
    x_needs_gradient: bool = True,
    saved: int | None = None,
    maps: int = 1,
    how: How | None = None,
) -> int:
    """The memory of `linear`, applied at `positions` places; `saved` is what x is a view of, if it is one.

    Of `maps` in one batched product each has rows of its own among the tape's. `n_in` and `n_out` are those of the
    whole map, of which a rank has a part if it is split.
    """
    weights = part_shapes(tape, n_in, n_out, how, bias=bias)
    if how is not None:
        tape.compute_elsewhere(2.0 * n_in * n_out * positions)
        n_out = n_out if how == "rows" else n_out // tape.ranks
    values = n_out * positions
    if maps > 1:
        weights = [(maps, rows * width) for rows, width in weights]
    scaled = [tape.scaled(weights)] if p and tape.device == "cpu" else []
    mask = [] if relu or not p else [tape.scratch(values, itemsize=MASK_BYTES)]
    y = tape.operation(
        values,
        [*scaled, *([x] if x_needs_gradient else [])],
        saves=[x if saved is None else saved, *scaled, *mask],
        saves_output=relu,
        running=tape.held(values, itemsize=tape.itemsize + MASK_BYTES * relu) if p else NOTHING,
        backward_running=tape.held(values if relu or p else 0),
        parameters=() if scaled else weights,
    )
    if how == "rows":
        tape.send("all_reduce", values)
    elif how is not None and x_needs_gradient:
        tape.send("all_reduce", n_in * positions, forward=False)
    return gathered_tape(tape, y) if how == "gathered" else y


def gathered_tape(tape: Tape, x: int) -> int:
    """The memory of `gathered`: what arrives is put in order."""
    whole = tape.ranks * tape.values(x)
    tape.send("all_gather", whole)
    return tape.operation(whole, [x], running=tape.held(whole))


def part_shapes(tape: Tape, n_in: int, n_out: int, how: How | None, *, bias: bool = True) -> list[Shape]:
    """Of a rank's part of a linear map's parameters."""
    if how == "rows":
        return [(n_out, n_in // tape.ranks), *linear_shapes(n_in, n_out, bias=bias)[1:]]
    return linear_shapes(n_in, n_out // tape.ranks if how is not None else n_out, bias=bias)


def linear_shapes(n_in: int, n_out: int, *, bias: bool = True) -> list[Shape]:
    """Of a linear map's parameters."""
    return [(n_out, n_in), (n_out, 1)] if bias else [(n_out, n_in)]
