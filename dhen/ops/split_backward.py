"""Backward in two passes: which gradients an operation of our own has to compute in the running one.

Under a zero-bubble schedule (arXiv 2401.10241) a stage's backward comes as a pass for its inputs and one for its
weights. PyTorch's own operations ask autograd which of their gradients the running pass is for; an operation in
Python is asked for all of them in both passes, unless it asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

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
    return tuple(need and _is_wanted(node) for need, (node, _) in zip(needs, edges, strict=False))


def _is_wanted(node: Any) -> bool:
    if node is None:
        return False
    if node.name() == "torch::autograd::AccumulateGrad":
        return _running == "weight"
    return bool(torch._C._will_engine_execute_node(node))
