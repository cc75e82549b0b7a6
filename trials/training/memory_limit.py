"""A declared limit on a rank's memory, kept whatever the planner has predicted.

On a CPU every storage is counted (`trials.planner.memory_counter`) and an operation beyond the limit raises,
so that small memories can be tried out without an accelerator; counting costs time. On CUDA the allocator
itself refuses (`set_per_process_memory_fraction`). What a real run keeps in host memory (weights set aside,
offloaded state) lies beside the rest on a CPU: `on_host` and `keep_on_host` leave it out of the count.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

from trials.cluster.cluster import CUDA_CONTEXT_BYTES
from trials.planner.memory_counter import HOST, OTHER, MemoryCounter, MemoryLimitError

M = TypeVar("M", bound=nn.Module)
PeakBytes = Callable[[], int]
"""A function that returns the most that this rank has held so far."""
SIZE = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
"""Pattern of a size in PyTorch's message when CUDA memory is exhausted."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""Beginning of PyTorch's message when the host has no memory left."""

_counter: ContextVar[MemoryCounter | None] = ContextVar("_counter", default=None)


@contextlib.contextmanager
def limited_memory(limit_bytes: int | None, device: torch.device) -> Iterator[PeakBytes]:
    """Limits what this rank may hold inside to `limit_bytes`; None for as much as there is.

    Raises (inside):
        torch.OutOfMemoryError: beyond the limit; on a CPU the `MemoryLimitError` says by how much.
    """
    if device.type == "cuda":
        if device.index is None:  # the allocator's limits are asked for by number
            device = torch.device(device.type, torch.cuda.current_device())
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0
        if limit_bytes is not None:  # the context is of what is declared, and not the allocator's
            share = min(1.0, max(0.0, (limit_bytes - CUDA_CONTEXT_BYTES) / total))
        torch.cuda.set_per_process_memory_fraction(share, device)
        yield lambda: process_peak_bytes(device)
        torch.cuda.set_per_process_memory_fraction(
            1.0, device
        )  # after an error `needed_and_limit` asks for it
    elif limit_bytes is None:
        yield lambda: process_peak_bytes(device)
    else:
        with MemoryCounter(limit_bytes=limit_bytes) as counter, counted_by(counter):
            yield lambda: counter.peak


def process_peak_bytes(device: torch.device) -> int:
    """Returns the most that this process has held so far: on a CPU of the host's memory, on a CUDA device what its
    allocator held, as measured, and the context, which is not: CUDA tells only what all processes on a device take
    together."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT_BYTES
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def counted_by(counter: MemoryCounter) -> Iterator[None]:
    """Tells this counter, inside, what `on_host` and `keep_on_host` leave out."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def is_counted() -> bool:
    """Tells whether this rank's memory is counted against a declared limit."""
    return _counter.get() is not None


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Counts what is made inside as host memory, where it would be on a machine with accelerators."""
    counter = _counter.get()
    with counter.new_are(HOST) if counter else contextlib.nullcontext():
        yield


def on_device_for_good(module: M, device: torch.device) -> M:
    """Moves a module that was made `on_host` to a device, to whose memory it counts from here on."""
    module.to(device)
    count_on_device([*module.parameters(), *module.buffers()])
    return module


def count_on_device(tensors: Iterable[Tensor]) -> None:
    """Counts tensors to the device's memory from here on, also those that were made `on_host`."""
    counter = _counter.get()
    if counter is not None:
        counter.label(tensors, OTHER)


def count_on_host(tensors: Iterable[Tensor]) -> None:
    """Counts tensors to the host's memory from here on, where they are on a machine with accelerators."""
    counter = _counter.get()
    if counter is not None:
        counter.label(tensors, HOST)


def keep_on_host(parameters: Iterable[Tensor]) -> None:
    """Counts these offloaded parameters (`Strategy.offload`), and the gradients they will have, as host memory.

    Their optimizer's state counts so too if its steps are made inside of `on_host`.
    """
    counter = _counter.get()
    if counter is None:
        return

    def label_gradient(parameter: Tensor) -> None:
        assert parameter.grad is not None
        counter.label([parameter.grad], HOST)

    offloaded = list(parameters)
    count_on_host(offloaded)
    for parameter in offloaded:
        parameter.register_post_accumulate_grad_hook(label_gradient)  # type: ignore[no-untyped-call]


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """Returns the lack of memory that is behind an error, which code in between may have raised anew; None for
    another cause."""
    while error is not None and not (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        # what torch raises if the host has none left is of no kind of its own
        or (isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error))
    ):
        error = error.__cause__ or error.__context__
    return error


def needed_and_limit(error: BaseException) -> tuple[int | None, int | None]:
    """Returns the bytes needed when memory was lacking, and what the rank may hold; None if unknown."""
    if isinstance(error, MemoryLimitError):
        return error.needed_bytes, error.limit_bytes
    tried = SIZE.search(str(error))
    if not (isinstance(error, torch.OutOfMemoryError) and tried and torch.cuda.is_available()):
        return None, None
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    limit = min(total, round(torch.cuda.get_per_process_memory_fraction(device) * total) + CUDA_CONTEXT_BYTES)
    held = CUDA_CONTEXT_BYTES + torch.cuda.memory_allocated(device)
    return held + round(float(tried[1]) * UNITS[tried[2]]), limit


# Keeps freed memory with the process, so that a step's activations do not fault their pages in anew.
#
# glibc gives allocations of megabytes back to the system as soon as they are freed; a training step frees and
# asks for the same ones again and again. How much keeping them gains is in docs/log.md.

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER_TRIM = 2**31 - 1
GROW_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """Tells the C library to keep freed memory, if it is glibc; elsewhere nothing happens."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_TOP_PAD, GROW_BYTES)
