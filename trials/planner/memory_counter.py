"""Counts the bytes of tensors that are alive, operation by operation, and keeps their peak.

For real tensors on CPU ranks and for fake ones (`torch._subclasses.fake_tensor`) alike. A dispatch mode sees
what every operation puts out; a storage counts from then until it is freed. What `resize_` does to storages
(`fully_shard` gathers and frees parameters with it) is counted too. Left out: the scratch memory inside a
kernel, the allocator's rounding, and storages that no operation has put out since the counter began: give
those to `label`. A CUDA device counts by itself (`torch.cuda.max_memory_allocated`).

With a limit it refuses what goes beyond, as an accelerator's allocator does.

gloo's threads let go of what they sent some time after all else has. If ranks speak through gloo, they are
given a moment to do so before a new peak is noted, and a longer one before anything is refused: a peak is then
what a training holds, not when a thread had its turn.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from dhen.tape import Footprint, Shape, UntapedSegment
from trials.cluster.cluster import byte_words
from trials.cluster.machine import Precision
from trials.optim.adamw import DTYPES

OTHER = "activations"
"""The kind of a storage that nobody has labelled: activations, their gradients, temporaries."""
HOST = "host"
"""The kind of what lives in host memory: it has a count and a peak of its own, outside of `total`."""

LATE_SECONDS = 0.005
"""Seconds that gloo's threads have to let go of memory before a new peak is noted."""
WORTH_WAITING = 1.003
"""Share of the last peak that was waited for, above which a new one is: less makes no difference to a plan."""
PATIENCE = 50
"""How often they are given that time before an operation is refused."""


class MemoryLimitError(torch.OutOfMemoryError):
    """The error of a rank that needs more memory than was declared for it."""

    def __init__(self, needed_bytes: int, limit_bytes: int, where: str) -> None:
        super().__init__(
            f"out of memory: {byte_words(needed_bytes)} are needed, {byte_words(limit_bytes)} are declared for a "
            f"rank, {byte_words(needed_bytes - limit_bytes)} less, {where}"
        )
        self.needed_bytes, self.limit_bytes, self.where = needed_bytes, limit_bytes, where


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages while it is entered: `with MemoryCounter() as counter: ...`.

    With `limit_bytes` an operation after which `total` is above that raises a `MemoryLimitError`; tensors without
    contents, which sharded tensors make to find out shapes, then do not count.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit_bytes = limit_bytes
        self._operation: object = "a storage's resize"
        self.by_kind: Counter[str] = Counter()
        """Bytes alive now, by kind."""
        self.total = 0
        """Bytes alive now, without those on the host."""
        self._kind = OTHER
        self._gloo, self._waited_for = False, 0
        self._lock = threading.RLock()  # storages are freed by gloo's threads too
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], str, int]] = {}
        self.start_over("")

    def start_over(self, phase: str) -> None:
        """Forgets the peaks so far; what is alive stays counted."""
        self.peak, self.peak_by_kind, self.peak_phase = self.total, Counter(self.by_kind), phase
        self.host_peak, self.peaks = self.by_kind[HOST], {phase: self.total}
        self.phase, self._waited_for = phase, self.total

    def begin(self, phase: str) -> None:
        """Begins a phase (`forward`, `update`) with a peak of its own in `peaks`."""
        self.phase = phase
        self._note_peaks()

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Gives the storages of these tensors a kind; storages not counted so far are counted from now on."""
        for storage in _storages(list(tensors)):
            self._see(storage)
            reference, before, size = self._known[storage._cdata]
            self._known[storage._cdata] = (reference, kind, size)
            self._change(before, -size)
            self._change(kind, size)

    @contextmanager
    def new_are(self, kind: str) -> Iterator[None]:
        """Gives storages that appear inside, or grow from nothing, this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def __enter__(self) -> Self:
        """Starts counting; several counters may be entered, and left in reverse order."""
        self._gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        original = self._resize = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._see(storage)
            return result

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops seeing new storages; what is freed still lowers the count."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and looks at what it put out; of a sharded tensor, at its local part."""
        # of sharded tensors: the package of DTensor takes a second to import, and the planner counts without it
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._operation = func
        for storage in _storages(result):
            self._see(storage)
        return result

    def _see(self, storage: UntypedStorage) -> None:
        if self._limit_bytes is not None and storage.device.type == "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = (weakref.ref(storage, lambda _: self._gone(key)), self._kind, 0)
        reference, kind, before = self._known[key]
        if size != before:
            kind = kind if before else self._kind
            self._known[key] = (reference, kind, size)
            self._change(kind, size - before)

    def _gone(self, key: int) -> None:
        _, kind, size = self._known.pop(key)
        self._change(kind, -size)

    def _change(self, kind: str, difference: int) -> None:
        with self._lock:
            self.by_kind[kind] += difference
            if kind != HOST:
                self.total += difference
        if difference > 0:
            if self._gloo and (self.total > self._waited_for * WORTH_WAITING or self._is_beyond()):
                self._wait_for_gloo()
            self._note_peaks()
            if self._is_beyond() and kind != HOST:
                assert self._limit_bytes is not None
                raise MemoryLimitError(self.total, self._limit_bytes, self._where(difference))

    def _is_beyond(self) -> bool:
        return self._limit_bytes is not None and self.total > self._limit_bytes

    def _wait_for_gloo(self) -> None:
        time.sleep(LATE_SECONDS)
        for _ in range(PATIENCE):
            if not self._is_beyond():
                break
            time.sleep(LATE_SECONDS)
        self._waited_for = max(self._waited_for, self.total)

    def _where(self, difference: int) -> str:
        """Says which operation it was, and in which half of a step."""
        backward = torch._C._current_graph_task_id() != -1
        phase = "in backward" if backward else f"in {self.phase}" if self.phase else "outside of backward"
        return f"{phase}, at {self._operation} ({byte_words(difference)})"

    def _note_peaks(self) -> None:
        self.host_peak = max(self.host_peak, self.by_kind[HOST])
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.total)
        if self.total > self.peak:
            self.peak, self.peak_by_kind, self.peak_phase = self.total, Counter(self.by_kind), self.phase


def _storages(result: Any) -> Iterator[UntypedStorage]:
    """Yields the storages of all tensors in an operation's result; of wrapped and sparse ones, of the tensors
    inside."""
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _storages(item)
    elif isinstance(result, Tensor):
        inner_tensors = _parts(result)
        if inner_tensors:
            yield from _storages(inner_tensors)
        else:
            yield result.untyped_storage()


def _parts(tensor: Tensor) -> list[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return []


# The memory of a module that declares none: one forward and one backward of it under fake tensors.
#
# A module with a `write` method tells its memory in microseconds (`dhen.tape`). Of any other module the planner
# takes this trace once per batch size and precision, which takes about a tenth of a second. The random bits of
# dropout and of rounding are replaced by stand-ins, since they belong to the process and not to the module.

THREADS = 2
"""Number of torch's threads during a trace: with more than one, `dhen.ops.norm` takes another path."""


@lru_cache(maxsize=1024)
def trace_module(
    undeclared: UntapedSegment, precision: Precision, batch: int
) -> tuple[Footprint, tuple[Shape, ...], int]:
    """Returns the footprint of a segment that declares no memory, from its forward and backward under fake
    tensors, the shapes of its parameters, and the bytes of its buffers.

    Backward's peak has all of its parameters' gradients in it, also if a strategy moves them away.
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
    return footprint, shapes, sum(buffer.nbytes for buffer in module.buffers())


@contextmanager
def same_code_path() -> Iterator[None]:
    """Makes the code inside take the same path on every machine and under fake tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with (
            patch("dhen.ops.norm.random_bytes", _no_random_bytes),
            patch("trials.optim.adamw.random_bits", _no_random_bits),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


def _no_random_bytes(count: int) -> Tensor:
    """Stands in for `dhen.ops.norm.random_bytes` without its pools of bits, which belong to the process,
    not to a model."""
    return torch.empty(-(-count // 8), dtype=torch.int64).view(torch.int8)[:count]


def _no_random_bits(count: int, *_: object) -> Tensor:
    """Stands in for `trials.optim.adamw.random_bits` without its ring of random bits, which belongs to
    the process."""
    return torch.zeros((), dtype=torch.int32).expand(count)
