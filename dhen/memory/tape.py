"""A tape of operations: what a module's forward makes, saves for backward, and needs only while it runs.

A module's declaration beside its FLOPs: it writes its operations on a `Tape` in the order in which forward
runs them, in numbers per example (a row of the batch dimension, of which members of one network have several
an example: `Tape.rows`); `dhen.memory.replay` plays a tape back for a batch and tells the memory.
`tests/contracts` holds every declaration to what PyTorch really allocates. The loss and statistics of a few
bytes per example may be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Device = Literal["cpu", "cuda"]
FP32_BYTES = 4
MASK_BYTES = 1


class Held(NamedTuple):
    """Memory as a function of the batch."""

    each: int = 0
    """Bytes per example."""
    fixed: int = 0
    """Bytes at any batch."""


NOTHING = Held()
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
    """Its output (not where it is a view), and of what it saves the tensors that were not there before."""
    running: Held
    """Alive only while it runs, beside all it makes."""
    backward_running: Held
    """Alive only while its backward runs, beside the gradients it takes and makes."""
    parameter_bytes: int
    """Of the parameters that it has gradients for."""
    more_outputs: tuple[int, ...]
    """Further ones, views that take no memory of their own; each must be read, for its gradient."""
    passes: bool
    """The gradients of its inputs are views of its output's: its backward makes nothing."""


class Sent(NamedTuple):
    """What ranks that split a module send each other at once, while nothing else goes on."""

    kind: Literal["all_reduce", "all_gather"]
    size: Held
    """Of the whole tensor, after gathering."""
    forward: bool
    """Whether forward sends it, else backward."""


class Tape:
    """The operations of a forward pass, in order."""

    def __init__(self, itemsize: int, device: Device = "cpu", ranks: int = 1) -> None:
        """`itemsize`: bytes of a number in the precision that the dense part computes in; `ranks`: over how many
        modules are split."""
        self.itemsize, self.device, self.ranks = itemsize, device, ranks
        self.sent: list[Sent] = []
        self.flops_elsewhere = 0.0
        """FLOPs of an example that other ranks compute."""
        self.rows = 1
        """Of the batch dimension, an example, from here on: members' (`dhen.members`)."""
        self.operations: list[Operation] = []
        self.sizes: list[Held] = []
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
        self.sent.append(Sent(kind, self.held(values), forward))

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

    def held(self, values: int = 0, *, fixed: int = 0, itemsize: int | None = None) -> Held:
        """Memory of so many numbers per row, and so many at any batch."""
        size = itemsize or self.itemsize
        return Held(values * size * self.rows, fixed * size)

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
        running: Held = NOTHING,
        backward_running: Held = NOTHING,
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
        """To another precision; the same tensor where it is no other."""
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
