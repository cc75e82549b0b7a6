"""Plays a tape back: forward, then backward in autograd's order; the memory at every moment, for any batch.

Tensors are freed at their last use, saved ones after the last backward that reads them, as PyTorch frees
them. Gradients of one tensor from several consumers are added up into new memory, as PyTorch does wherever
storage is shared or a dispatch mode watches; where it adds in place the replay is above by that one tensor.

What is made and freed when does not depend on the batch, so a tape is played once. All sums hold bytes an
example and bytes at any batch in one integer, the first times `EACH`; a peak is the largest of a few lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dhen.memory.tape import Held, Operation, Tape

EACH = 2**48
"""More than the bytes at any batch can be."""


class Footprint(NamedTuple):
    """Memory of a part of a model for a batch, in bytes."""

    input: int
    """Its inputs, alive all through forward."""
    output: int
    kept: int
    """Saved for backward between the two passes, inputs too where they are saved, without the output."""
    forward_peak: int
    """Most that is alive at a moment of forward beside the inputs, output included."""
    discarding_peak: int
    """The same where nothing is saved (checkpointing's first pass, evaluation)."""
    repeated_peak: int
    """As `forward_peak` in checkpointing's second pass, gradients of activations included: it begins when backward
    has come to the last operation that saves, and PyTorch ends it with that operation."""
    backward_peak: int
    """Most that is alive in backward beside parameter gradients that are done: what was kept, gradients of
    activations, and the parameter gradients of one operation."""
    backward_peak_with_gradients: int
    """The same with all parameter gradients made so far."""
    recomputed_peak: int
    """As `backward_peak` after a recomputation, which holds the inputs as long as anything that was saved."""
    recomputed_peak_with_gradients: int
    gradients_made: int
    """What is alive in backward once the last parameter gradient has been made, beside these gradients."""
    recomputed_gradients_made: int
    traffic: int
    """Bytes that forward reads and writes: each operation's inputs, weights and outputs once."""


class Replayed(NamedTuple):
    """Memory as a function of the batch: for each field of `Footprint` the lines that it is the top of."""

    lines: tuple[tuple[Held, ...], ...]

    def at(self, batch: int) -> Footprint:
        """For so many examples."""
        return Footprint(*[max([each * batch + fixed for each, fixed in lines]) for lines in self.lines])


def replay(tape: Tape, output: int) -> Replayed:
    """Plays the tape from its inputs to `output` and back."""
    sizes = [_packed(held) for held in tape.sizes]
    saved = {tensor for operation in tape.operations for tensor in operation.saves}
    made = saved.difference(tape.given, (output,))
    kept = sum(sizes[tensor] for tensor in made.union(saved.intersection(tape.inputs)))
    start = kept + sizes[output] * (output in saved)
    backward, recomputed = _Backward(tape, sizes), _Backward(tape, sizes)
    forward = _forward(tape, sizes, {*made, output})
    repeated = max(
        (index + 1 for index, operation in enumerate(tape.operations) if operation.saves), default=0
    )
    backward.play(start, output)
    inputs = sum(sizes[tensor] for tensor in tape.inputs if tensor not in saved)
    recomputed.play(start + inputs, output, also_held=tape.inputs)
    fields = (
        [sum(sizes[tensor] for tensor in tape.inputs)],
        [sizes[output]],
        [kept],
        forward,
        _forward(tape, sizes, {output}),
        [moment + recomputed.gradients for moment in forward[:repeated]],
        backward.moments,
        backward.moments_with_gradients,
        recomputed.moments,
        recomputed.moments_with_gradients,
        backward.gradients_made,
        recomputed.gradients_made,
        [sum(_traffic(operation, sizes) for operation in tape.operations)],
    )
    return Replayed(tuple(map(_top, fields)))


def _packed(held: Held) -> int:
    return held.each * EACH + held.fixed


def _top(moments: Iterable[int]) -> tuple[Held, ...]:
    """Of all moments those that may be the highest at some batch."""
    top: list[Held] = []
    for moment in sorted(set(moments), reverse=True):
        each, fixed = divmod(moment, EACH)
        if not top or fixed > top[-1].fixed:
            top.append(Held(each, fixed))
    return tuple(top) or (Held(),)


def _forward(tape: Tape, sizes: Sequence[int], stay: set[int]) -> list[int]:
    """What is alive while each operation runs; `stay` outlives the pass."""
    freed: list[list[int]] = [[] for _ in tape.operations]
    for operation in tape.operations:
        for tensor in operation.makes:
            if tensor not in stay:
                freed[tape.last_use[tensor]].append(tensor)
    live, moments = 0, []
    for operation, over in zip(tape.operations, freed, strict=True):
        for tensor in operation.makes:
            live += sizes[tensor]
        moments.append(live + _packed(operation.running))
        for tensor in over:
            live -= sizes[tensor]
    return moments


def _traffic(operation: Operation, sizes: Sequence[int]) -> int:
    touched = {*operation.inputs, *operation.makes}
    return sum(sizes[tensor] for tensor in touched) + operation.parameter_bytes


class _Backward:
    """The second pass. Gradients lie in storages of [size, references], since some are views of others."""

    def __init__(self, tape: Tape, sizes: Sequence[int]) -> None:
        self._tape, self._sizes = tape, sizes
        self._beside = tape.given.difference(tape.inputs)
        self._gradients: dict[int, list[int]] = {}
        self._live = self._parameters = 0
        self.moments: list[int] = []
        self.moments_with_gradients: list[int] = []
        self.gradients = 0
        """Gradients of activations when the first operation comes that needs what was saved."""
        self.gradients_made: list[int] = []
        """What is alive once the last parameter gradient has been made; nothing where there is none."""

    def play(self, kept: int, output: int, also_held: Sequence[int] = ()) -> None:
        """From the output's gradient, beside `kept`; `also_held` until nothing that was saved is left."""
        saving = [operation for operation in self._tape.operations if operation.saves]
        first = saving[0] if saving else None
        held = Counter(tensor for operation in saving for tensor in operation.saves)
        held.update(also_held)
        self._live = kept
        self._gradients[output] = self._new(self._sizes[output])
        for operation in reversed(self._tape.operations):
            if operation.output not in self._gradients:
                continue
            if saving and operation is saving[-1]:
                self.gradients = self._live - kept
            made = self._run(operation)
            self._let_go(held, operation.saves)
            if operation is first:
                self._let_go(held, also_held)
            if operation.parameter_bytes:
                self.gradients_made = [self._live]
            for tensor, gradient in made:
                self._accumulate(tensor, gradient)

    def _let_go(self, held: Counter[int], tensors: Iterable[int]) -> None:
        """Freed where nobody else holds them and they are not somebody else's."""
        for tensor in tensors:
            held[tensor] -= 1
            if held[tensor] == 0 and tensor not in self._beside:
                self._live -= self._sizes[tensor]

    def _run(self, operation: Operation) -> list[tuple[int, list[int]]]:
        """An operation's own backward: the gradients of its inputs; its outputs' are let go."""
        storage = self._gradients.pop(operation.output)
        if operation.passes:
            storage[1] += len(operation.inputs)
            made = [(tensor, storage) for tensor in operation.inputs]
        else:
            made = [(tensor, self._new(self._sizes[tensor])) for tensor in operation.inputs]
        self._note(_packed(operation.backward_running) + operation.parameter_bytes)
        self._parameters += operation.parameter_bytes
        self._release(storage)
        for tensor in operation.more_outputs:
            self._release(self._gradients.pop(tensor))
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
        self.moments.append(self._live + running)
        self.moments_with_gradients.append(self._live + self._parameters + running)
