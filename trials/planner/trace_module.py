"""The memory of a module that declares none: one forward and one backward of it under fake tensors.

Modules with a `write` method are known in microseconds (`dhen.memory.tape`); of any other the planner takes this
trace once per batch size and precision, which takes about a tenth of a second. Random bits of dropout and of
rounding are stood in for, since they belong to the process and not to the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dhen.memory.replay import Footprint
from dhen.memory.segments import Undeclared
from dhen.memory.tape import Shape
from trials.cluster.machine import Precision
from trials.memory.counter import MemoryCounter
from trials.optim.master_weights import DTYPES

THREADS = 2
"""Of torch during a trace: with more than one, `dhen.ops.norm` takes another path."""


class TracedModule(NamedTuple):
    """What a trace tells of one module."""

    footprint: Footprint
    shapes: tuple[Shape, ...]
    """Of its parameters."""
    buffer_bytes: int


@lru_cache(maxsize=1024)
def trace_module(undeclared: Undeclared, precision: Precision, batch: int) -> TracedModule:
    """The footprint of a segment that declares no memory, from its forward and backward under fake tensors.

    Backward's peak has all of its parameters' gradients in it, also where a strategy moves them away.
    """
    with FakeTensorMode(), same_code_path():
        dtype, module = DTYPES[precision], undeclared.build().train()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)  # `Module.to` fails under fake tensors
        sizes = (batch * undeclared.rows, *[batch] * (len(undeclared.inputs) - 1))
        x, *others = (
            torch.zeros(size, *shape, dtype=dtype)
            for size, shape in zip(sizes, undeclared.inputs, strict=True)
        )
        x.requires_grad_()
        parameters = list(module.parameters())
        with MemoryCounter() as counter:
            counter.label([x, *others, *parameters, *module.buffers()], "given")
            there = counter.total
            with torch.no_grad():
                discarded = module(x, *others)
            discarding_peak = counter.peak - there
            del discarded
            counter.start_over("forward")
            y = module(x, *others)
            forward_peak, output = counter.peak - there, y.untyped_storage().nbytes()
            kept = counter.total - there - output
            counter.start_over("backward")
            gradients = torch.autograd.grad([y], [x, *parameters], [torch.empty_like(y)], allow_unused=True)
            backward_peak = counter.peak - there
            del gradients
    given = x.untyped_storage().nbytes()
    held = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    footprint = Footprint(
        input=given,
        output=output,
        kept=kept + given,
        forward_peak=forward_peak,
        discarding_peak=discarding_peak,
        backward_peak=given + backward_peak,
        backward_peak_with_gradients=given + backward_peak,
        recomputed_peak=given + backward_peak,
        recomputed_peak_with_gradients=given + backward_peak,
        traffic=given + 2 * forward_peak + held,
    )
    shapes = tuple((p.shape[0], p.shape[1:].numel()) for p in parameters)
    return TracedModule(footprint, shapes, sum(buffer.nbytes for buffer in module.buffers()))


@contextmanager
def same_code_path() -> Iterator[None]:
    """Inside, the code takes the same path on every machine and under fake tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with (
            patch("dhen.ops.dropout.random_bytes", _no_random_bytes),
            patch("trials.optim.bf16_adamw.random_bits", _no_random_bits),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


def _no_random_bytes(count: int) -> Tensor:
    """`dhen.ops.dropout.random_bytes` without its pools of bits, which belong to the process, not to a model."""
    return torch.empty(-(-count // 8), dtype=torch.int64).view(torch.int8)[:count]


def _no_random_bits(count: int, *_: object) -> Tensor:
    """`trials.optim.bf16_adamw.random_bits` without its ring of them, likewise."""
    return torch.zeros((), dtype=torch.int32).expand(count)
