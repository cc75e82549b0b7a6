"""The memory of a module that declares none: one forward and one backward of it under fake tensors.

A module with a `write` method tells its memory in microseconds (`dhen.memory.tape`). Of any other module the
planner takes this trace once per batch size and precision, which takes about a tenth of a second. The random
bits of dropout and of rounding are replaced by stand-ins, since they belong to the process and not to the module.
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
"""Number of torch's threads during a trace: with more than one, `dhen.ops.norm` takes another path."""


class TracedModule(NamedTuple):
    """The result of tracing one module."""

    footprint: Footprint
    shapes: tuple[Shape, ...]
    """Shapes of the module's parameters."""
    buffer_bytes: int


@lru_cache(maxsize=1024)
def trace_module(undeclared: Undeclared, precision: Precision, batch: int) -> TracedModule:
    """Returns the footprint of a segment that declares no memory, from its forward and backward under fake
    tensors.

    Backward's peak has all of its parameters' gradients in it, also where a strategy moves them away.
    """
    with FakeTensorMode(), same_code_path():
        dtype, module = DTYPES[precision], undeclared.build().train()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)  # `Module.to` fails under fake tensors
        sizes = (batch * undeclared.rows, *[batch] * (len(undeclared.inputs) - 1))
        x, *other_inputs = (
            torch.zeros(size, *shape, dtype=dtype)
            for size, shape in zip(sizes, undeclared.inputs, strict=True)
        )
        x.requires_grad_()
        parameters = list(module.parameters())
        with MemoryCounter() as counter:
            counter.label([x, *other_inputs, *parameters, *module.buffers()], "given")
            bytes_before = counter.total
            with torch.no_grad():
                discarded = module(x, *other_inputs)
            discarding_peak = counter.peak - bytes_before
            del discarded
            counter.start_over("forward")
            y = module(x, *other_inputs)
            forward_peak, output = counter.peak - bytes_before, y.untyped_storage().nbytes()
            kept_bytes = counter.total - bytes_before - output
            counter.start_over("backward")
            gradients = torch.autograd.grad([y], [x, *parameters], [torch.empty_like(y)], allow_unused=True)
            backward_peak = counter.peak - bytes_before
            del gradients
    input_bytes = x.untyped_storage().nbytes()
    parameter_bytes = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    footprint = Footprint(
        input=input_bytes,
        output=output,
        kept=kept_bytes + input_bytes,
        forward_peak=forward_peak,
        discarding_peak=discarding_peak,
        repeated_peak=forward_peak + output,
        backward_peak=input_bytes + backward_peak,
        backward_peak_with_gradients=input_bytes + backward_peak,
        recomputed_peak=input_bytes + backward_peak,
        recomputed_peak_with_gradients=input_bytes + backward_peak,
        gradients_made=input_bytes + max(input_bytes, backward_peak - parameter_bytes),
        recomputed_gradients_made=input_bytes + max(input_bytes, backward_peak - parameter_bytes),
        traffic=input_bytes + 2 * forward_peak + parameter_bytes,
    )
    shapes = tuple((p.shape[0], p.shape[1:].numel()) for p in parameters)
    return TracedModule(footprint, shapes, sum(buffer.nbytes for buffer in module.buffers()))


@contextmanager
def same_code_path() -> Iterator[None]:
    """Makes the code inside take the same path on every machine and under fake tensors."""
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
    """Stands in for `dhen.ops.dropout.random_bytes` without its pools of bits, which belong to the process,
    not to a model."""
    return torch.empty(-(-count // 8), dtype=torch.int64).view(torch.int8)[:count]


def _no_random_bits(count: int, *_: object) -> Tensor:
    """Stands in for `trials.optim.bf16_adamw.random_bits` without its ring of random bits, which belongs to
    the process."""
    return torch.zeros((), dtype=torch.int32).expand(count)
