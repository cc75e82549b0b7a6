"""A tape of operations: what a module's forward makes, saves for backward, and needs only while it runs.

A module's declaration beside its FLOPs: it writes its operations on a `Tape` in the order in which forward
runs them, in numbers per example (a row of the batch dimension, of which members of one network have several
an example: `Tape.rows`); a tape is played back for a batch, which gives the memory.
`tests/contracts` holds every declaration to what PyTorch really allocates. The loss and statistics of a few
bytes per example may be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from torch import nn

Device = Literal["cpu", "cuda"]
FP32_BYTES = 4
MASK_BYTES = 1


class LinearBytes(NamedTuple):
    """Memory as a function of the batch."""

    each: int = 0
    """Bytes per example."""
    fixed: int = 0
    """Bytes at any batch."""


NOTHING = LinearBytes()
Shape = tuple[int, int]
"""Of a parameter: its first dimension, along which it is sharded, and all others together."""


class Operation(NamedTuple):
    """One operation of a forward pass. Tensors are numbers, in the order of being made."""

    inputs: tuple[int, ...]
    """Tensors that get a gradient from it, one as often as it is read."""
    output: int
    saves: tuple[int, ...]
    """Tensors kept until its backward has run."""
    makes: tuple[int, ...]
    """Its output (not if it is a view), and of what it saves the tensors that were not there before."""
    running: LinearBytes
    """Alive only while it runs, beside all it makes."""
    backward_running: LinearBytes
    """Alive only while its backward runs, beside the gradients it takes and makes."""
    parameter_bytes: int
    """Of the parameters that it has gradients for."""
    more_outputs: tuple[int, ...]
    """Further ones, views that take no memory of their own; each must be read, for its gradient."""
    passes: bool
    """The gradients of its inputs are views of its output's: its backward makes nothing."""


class SplitTraffic(NamedTuple):
    """What ranks that split a module send each other at once, while nothing else goes on."""

    kind: Literal["all_reduce", "all_gather"]
    size: LinearBytes
    """Of the whole tensor, after gathering."""
    forward: bool
    """Whether forward sends it, else backward."""


class Tape:
    """The operations of a forward pass, in order."""

    def __init__(self, itemsize: int, device: Device = "cpu", ranks: int = 1) -> None:
        """`itemsize`: bytes of a number in the precision that the dense part computes in; `ranks`: over how many
        modules are split."""
        self.itemsize, self.device, self.ranks = itemsize, device, ranks
        self.sent: list[SplitTraffic] = []
        self.flops_elsewhere = 0.0
        """FLOPs of an example that other ranks compute."""
        self.rows = 1
        """Of the batch dimension, an example, from here on: members' (`dhen.members`)."""
        self.operations: list[Operation] = []
        self.sizes: list[LinearBytes] = []
        """Of all tensors."""
        self.inputs: list[int] = []
        """Tensors that are there before and counted as inputs."""
        self.given: set[int] = set()
        """All tensors that are there before."""
        self.last_use: dict[int, int] = {}
        """Of a tensor: the last operation during which somebody refers to it."""
        self.parameters: list[Shape] = []
        self.buffer_bytes = 0
        """Of what a module holds beside its parameters."""
        self._itemsizes: list[int] = []
        self._made: set[int] = set()

    def compute_elsewhere(self, flops: float) -> None:
        """Leaves the other ranks their shares of so many FLOPs per row, which are split over all."""
        self.flops_elsewhere += flops * self.rows * (self.ranks - 1) / self.ranks

    def send(self, kind: Literal["all_reduce", "all_gather"], values: int, *, forward: bool = True) -> None:
        """Ranks send each other a tensor of so many numbers per row."""
        self.sent.append(SplitTraffic(kind, self.held(values), forward))

    def input(self, values: int, itemsize: int | None = None) -> int:
        """A tensor of so many numbers per example that somebody else has made and holds."""
        self.inputs.append(self.beside(values, itemsize))
        return self.inputs[-1]

    def beside(self, values: int, itemsize: int | None = None) -> int:
        """The same, which is not counted among the inputs: what all layers read."""
        tensor = self.scratch(values, itemsize=itemsize)
        self._made.add(tensor)
        self.given.add(tensor)
        return tensor

    def scratch(self, values: int = 0, *, fixed: int = 0, itemsize: int | None = None) -> int:
        """A tensor that the operation which saves it makes: a mask, a scaled weight."""
        self.sizes.append(self.held(values, fixed=fixed, itemsize=itemsize))
        self._itemsizes.append(itemsize or self.itemsize)
        return len(self.sizes) - 1

    def held(self, values: int = 0, *, fixed: int = 0, itemsize: int | None = None) -> LinearBytes:
        """Memory of so many numbers per row, and so many at any batch."""
        size = itemsize or self.itemsize
        return LinearBytes(values * size * self.rows, fixed * size)

    def values(self, tensor: int) -> int:
        """Numbers per row of a tensor."""
        return self.sizes[tensor].each // (self._itemsizes[tensor] * self.rows)

    def operation(
        self,
        values: int,
        inputs: Sequence[int],
        *,
        saves: Sequence[int] = (),
        saves_output: bool = False,
        running: LinearBytes = NOTHING,
        backward_running: LinearBytes = NOTHING,
        parameters: Sequence[Shape] = (),
        itemsize: int | None = None,
        passes: bool = False,
        view: bool = False,
        fixed: int = 0,
        more_outputs: Sequence[int] = (),
    ) -> int:
        """Writes an operation down; its output, of `values` numbers per example and `fixed` at any batch.

        See `Operation`. The output of a `view` takes no memory of its own, though its gradient does.
        """
        output = self.scratch(values, fixed=fixed, itemsize=itemsize)
        saved_here = tuple(tensor for tensor in saves if tensor not in self._made)
        makes = saved_here if view else (output, *saved_here)
        self._made.update((output, *saved_here, *more_outputs))
        self.operations.append(
            Operation(
                inputs=tuple(inputs),
                output=output,
                saves=(*saves, output) if saves_output else tuple(saves),
                makes=makes,
                running=running,
                backward_running=backward_running,
                parameter_bytes=self.itemsize * sum(rows * width for rows, width in parameters),
                more_outputs=tuple(more_outputs),
                passes=passes,
            )
        )
        self.parameters += parameters
        self.refer(*inputs, *makes)
        return output

    def scaled(self, parameters: Sequence[Shape]) -> int:
        """Parameters times a number."""
        values = sum(rows * width for rows, width in parameters)
        return self.operation(0, [], parameters=parameters, fixed=values)

    def refer(self, *tensors: int) -> None:
        """Somebody still refers to these while the last operation runs: a caller's variable, a list."""
        for tensor in tensors:
            self.last_use[tensor] = len(self.operations) - 1

    def cast(self, x: int, itemsize: int) -> int:
        """To another precision; the same tensor if it is no other."""
        if itemsize == self._itemsizes[x]:
            return x
        return self.operation(self.values(x), [x], itemsize=itemsize)

    def copy(self, x: int) -> int:
        """The same numbers in another order in memory."""
        return self.operation(self.values(x), [x])

    def add(self, *terms: int) -> int:
        """A sum of tensors of one shape."""
        return self.operation(self.values(terms[0]), terms, passes=True)

    def view(self, x: int) -> int:
        """The same memory with a gradient of its own; operations save x itself."""
        return self.operation(self.values(x), [x], passes=True, view=True)

    def unbind(self, x: int, parts: int) -> list[int]:
        """Views of equal parts, whose gradients are stacked into one."""
        return self.split(x, [self.values(x) // parts] * parts)

    def split(self, x: int, values: Sequence[int]) -> list[int]:
        """Views of parts of so many numbers, whose gradients are put one after another."""
        first, *more = values
        others = [self.scratch(each) for each in more]
        return [self.operation(first, [x], view=True, more_outputs=others), *others]

    def concat(self, parts: Sequence[int]) -> int:
        """One after another."""
        return self.operation(sum(map(self.values, parts)), parts, passes=True)


# Plays a tape back: forward, then backward in autograd's order; the memory at every moment, for any batch.
#
# Tensors are freed at their last use, saved ones after the last backward that reads them, as PyTorch frees
# them. Gradients of one tensor from several consumers are added up into new memory, as PyTorch does wherever
# storage is shared or a dispatch mode watches; if it adds in place the replay is above by that one tensor.
#
# What is made and freed when does not depend on the batch, so a tape is played once. All sums hold bytes an
# example and bytes at any batch in one integer, the first times `EACH`; a peak is the largest of a few lines.

EACH = 2**48
"""More than the bytes at any batch can be."""


class Footprint(NamedTuple):
    """Memory of a part of a model for a batch, in bytes."""

    input: int
    """Its inputs, alive all through forward."""
    output: int
    kept: int
    """Saved for backward between the two passes, inputs too if they are saved, without the output."""
    forward_peak: int
    """Most that is alive at a moment of forward beside the inputs, output included."""
    discarding_peak: int
    """The same if nothing is saved (checkpointing's first pass, evaluation)."""
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


class FootprintLines(NamedTuple):
    """Memory as a function of the batch: for each field of `Footprint` the lines that it is the top of."""

    lines: tuple[tuple[LinearBytes, ...], ...]

    def at(self, batch: int) -> Footprint:
        """For so many examples."""
        return Footprint(*[max([each * batch + fixed for each, fixed in lines]) for lines in self.lines])


def replay(tape: Tape, output: int) -> FootprintLines:
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
    traffic = 0
    for operation in tape.operations:
        touched = {*operation.inputs, *operation.makes}
        traffic += sum(sizes[tensor] for tensor in touched) + operation.parameter_bytes
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
        [traffic],
    )
    return FootprintLines(tuple(map(_top, fields)))


def _packed(held: LinearBytes) -> int:
    return held.each * EACH + held.fixed


def _top(moments: Iterable[int]) -> tuple[LinearBytes, ...]:
    """Of all moments those that may be the highest at some batch."""
    top: list[LinearBytes] = []
    for moment in sorted(set(moments), reverse=True):
        each, fixed = divmod(moment, EACH)
        if not top or fixed > top[-1].fixed:
            top.append(LinearBytes(each, fixed))
    return tuple(top) or (LinearBytes(),)


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
        """What is alive once the last parameter gradient has been made; nothing if there is none."""

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
                other = self._gradients.get(tensor)
                if other is not None:
                    total = self._new(self._sizes[tensor])
                    self._note(0)
                    self._release(other)
                    self._release(gradient)
                    gradient = total
                self._gradients[tensor] = gradient

    def _let_go(self, held: Counter[int], tensors: Iterable[int]) -> None:
        """Freed if nobody else holds them and they are not somebody else's."""
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


# A model as segments, one after another, each with its FLOPs and its tape: what planners look at.
#
# Segments are what checkpointing and `fully_shard` act on: `features` (without the tables), every layer, and
# `head` (what stands above the last layer; all of a model that has no layers).


class TapeSetting(NamedTuple):
    """What a tape depends on beside the model."""

    itemsize: int
    """Bytes of a number in the precision that the dense part computes in."""
    device: Device
    ranks: int = 1
    """Number of ranks over which modules are split (`dhen.ops.split`)."""


class UntapedSegment(NamedTuple):
    """A segment that has no tape: what is needed to run it and look."""

    build: Callable[[], nn.Module]
    """The module; forward maps the inputs to one tensor."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of its inputs without the batch; the first needs a gradient."""
    kinds: tuple[str, ...]
    """Of the modules that declare no memory."""
    rows: int = 1
    """Of the first input, an example."""


class TapedSegment(NamedTuple):
    """A segment."""

    name: str
    flops: float
    """Forward matmul and attention FLOPs per example."""
    tape: Tape | None
    """None if a module of it declares no memory."""
    output: int
    """Of the tape's tensors, the segment's output."""
    undeclared: UntapedSegment | None = None
    whole: tuple[str, ...] = ()
    """Of a segment that is split over ranks: what each of them has whole, and why."""


# The number of rows per forward pass when nothing is learnt: in evaluations, scorings and servers.
#
# A training's plan sets it for its own evaluations (`trials.planner.pricing`).

MOST_ROWS = 8192
"""Largest number of rows per forward pass: with so many, a pass's fixed costs no longer count."""
PASS_BYTES = 2**29
"""Largest number of bytes that a forward pass holds, if no plan sets its rows."""


def row_bytes(segments: Iterable[TapedSegment]) -> int:
    """Returns the bytes per row at the peak of a forward pass through a model's segments without gradients.

    Segments with a module that declares no memory are left out.
    """
    passes = (replay(one.tape, one.output).at(1) for one in segments if one.tape is not None)
    return max((held.input + held.discarding_peak for held in passes), default=0)


def rows_at_once(model: nn.Module) -> int:
    """Returns the rows per forward pass of a model that no plan covers, by its `row_bytes`."""
    return max(1, min(MOST_ROWS, PASS_BYTES // max(1, getattr(model, "row_bytes", 0))))
