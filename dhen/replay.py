"""Plays a tape back for a batch: forward, then backward in autograd's order; the memory at every moment.

Tensors are freed at their last use, saved ones after the last backward that reads them, as PyTorch frees
them. Gradients of one tensor from several consumers are added up into new memory, as PyTorch does wherever
storage is shared or a dispatch mode watches; where it adds in place the replay is above by that one tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from dhen.tape import Operation, Tape


class Footprint(NamedTuple):
    """Memory of a part of a model for a batch: bytes beyond its inputs, which somebody else holds."""

    input: int
    """Its inputs, alive until its backward has ended."""
    output: int
    kept: int
    """Saved for backward between the two passes, without inputs and output."""
    forward_peak: int
    """Most that is alive at a moment of forward, output included."""
    discarding_peak: int
    """The same where nothing is saved (checkpointing's first pass, evaluation)."""
    backward_peak: int
    """Most that is alive in backward beyond parameter gradients that are done: what was kept, gradients of
    activations, and the parameter gradients of one operation."""
    backward_peak_with_gradients: int
    """The same with all parameter gradients made so far."""
    traffic: int
    """Bytes that forward reads and writes: each operation's inputs, weights and outputs once."""


def replay(tape: Tape, batch: int, output: int) -> Footprint:
    """Memory of `batch` examples from the tape's inputs to `output`."""
    sizes = [each * batch + fixed for each, fixed in tape.sizes]
    saved = {tensor for operation in tape.operations for tensor in operation.saves}
    kept = saved.difference(tape.given, (output,))
    kept_bytes = sum(sizes[tensor] for tensor in kept)
    backward = _Backward(tape, sizes, batch)
    start = kept_bytes + sizes[output] * (output in saved)
    backward_peak, with_gradients = backward.peaks(start, output)
    return Footprint(
        input=sum(sizes[tensor] for tensor in tape.inputs),
        output=sizes[output],
        kept=kept_bytes,
        forward_peak=_forward_peak(tape, sizes, batch, {*kept, output}),
        discarding_peak=_forward_peak(tape, sizes, batch, {output}),
        backward_peak=backward_peak,
        backward_peak_with_gradients=with_gradients,
        traffic=sum(_traffic(operation, sizes) for operation in tape.operations),
    )


def _forward_peak(tape: Tape, sizes: list[int], batch: int, stay: set[int]) -> int:
    """The most that is alive; `stay` outlives the pass."""
    freed: list[list[int]] = [[] for _ in tape.operations]
    for operation in tape.operations:
        for tensor in operation.makes:
            if tensor not in stay:
                freed[tape.last_use[tensor]].append(tensor)
    live = peak = 0
    for operation, over in zip(tape.operations, freed, strict=True):
        for tensor in operation.makes:
            live += sizes[tensor]
        each, fixed = operation.running
        peak = max(peak, live + each * batch + fixed)
        for tensor in over:
            live -= sizes[tensor]
    return peak


def _traffic(operation: Operation, sizes: list[int]) -> int:
    touched = {*operation.inputs, *operation.makes}
    return sum(sizes[tensor] for tensor in touched) + operation.parameter_bytes


class _Backward:
    """The second pass. Gradients lie in storages of (bytes, references), since some are views of others."""

    def __init__(self, tape: Tape, sizes: list[int], batch: int) -> None:
        self._tape, self._sizes, self._batch = tape, sizes, batch
        self._gradients: dict[int, list[int]] = {}
        self._live = self._peak = self._peak_with = self._parameters = 0

    def peaks(self, start: int, output: int) -> tuple[int, int]:
        """The most that is alive, without and with the parameter gradients that are done."""
        sizes = self._sizes
        held = [0] * len(sizes)
        for operation in self._tape.operations:
            for tensor in operation.saves:
                held[tensor] += 1
        for tensor in self._tape.given:
            held[tensor] = -1  # never freed here
        self._live = start
        self._gradients[output] = self._new(sizes[output])
        for operation in reversed(self._tape.operations):
            storage = self._gradients.pop(operation.output, None)
            if storage is None:
                continue
            made = self._run(operation, storage)
            for tensor in operation.saves:
                held[tensor] -= 1
                if held[tensor] == 0:
                    self._live -= sizes[tensor]
            for tensor, gradient in made:
                self._accumulate(tensor, gradient)
        return self._peak, self._peak_with

    def _run(self, operation: Operation, storage: list[int]) -> list[tuple[int, list[int]]]:
        """An operation's own backward: the gradients of its inputs, its output's let go."""
        if operation.passes:
            storage[1] += len(operation.inputs)
            made = [(tensor, storage) for tensor in operation.inputs]
        else:
            made = [(tensor, self._new(self._sizes[tensor])) for tensor in operation.inputs]
        each, fixed = operation.backward_running
        self._note(each * self._batch + fixed + operation.parameter_bytes)
        self._parameters += operation.parameter_bytes
        self._release(storage)
        return made

    def _accumulate(self, tensor: int, gradient: list[int]) -> None:
        other = self._gradients.get(tensor)
        if other is not None:
            total = self._new(self._sizes[tensor])
            self._note(0)
            self._release(other)
            self._release(gradient)
            gradient = total
        self._gradients[tensor] = gradient

    def _new(self, size: int) -> list[int]:
        self._live += size
        return [size, 1]

    def _release(self, storage: list[int]) -> None:
        storage[1] -= 1
        if storage[1] == 0:
            self._live -= storage[0]

    def _note(self, running: int) -> None:
        self._peak = max(self._peak, self._live + running)
        self._peak_with = max(self._peak_with, self._live + self._parameters + running)
