"""A model as parts whose kinds say how long they take: an interaction module, an ensemble, a norm, a lookup.

A part's time is a sum over its sizes, each times a number that belongs to the kind, the machine and the precision
(`trials.cluster.part_costs`). The first two sizes are read off the tape, the others are declared where the part
is: of a part that maps x_BMD to u_BLD its FLOPs, rows, and the numbers M, D, M D and L D of a row.
"""

from __future__ import annotations

from typing import NamedTuple

from dhen.memory.replay import traffic
from dhen.memory.tape import Held, Tape

DECLARED = 6
"""Number of sizes per example that a part declares."""


class Part(NamedTuple):
    """One part, for any batch."""

    kind: str
    operations: int
    """Number of operations of forward."""
    traffic: Held
    """Bytes that forward reads and writes: each operation's inputs, weights and outputs once."""
    per_example: tuple[float, ...]
    """`DECLARED` sizes per example."""

    def sizes(self, batch: int) -> tuple[float, ...]:
        """Returns the sizes for so many examples: operations, bytes of traffic, and those that are declared."""
        moved = self.traffic.each * batch + self.traffic.fixed
        return (self.operations, moved, *(size * batch for size in self.per_example))


def mapping(flops: float, embeddings: int, dim: int, out: int) -> tuple[float, ...]:
    """Returns the declared sizes of a part that maps M embeddings of length D to L, for one row."""
    return (flops, 1.0, embeddings, dim, embeddings * dim, out * dim)


def parts(tape: Tape) -> tuple[Part, ...]:
    """Returns the parts that are marked on a tape; what comes before the first mark belongs to none."""
    ends = [*(mark.first for mark in tape.marks[1:]), len(tape.operations)]
    moved = traffic(tape)
    return tuple(
        Part(mark.kind, end - mark.first, _sum(moved[mark.first : end]), mark.per_example)
        for mark, end in zip(tape.marks, ends, strict=True)
    )


def _sum(moved: list[Held]) -> Held:
    return Held(sum(held.each for held in moved), sum(held.fixed for held in moved))
