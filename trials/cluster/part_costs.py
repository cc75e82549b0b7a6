"""What a CPU takes for parts of models, by kind: a number of seconds for each of a part's sizes.

A roofline of peak and bandwidth misses most of a small step on a CPU: what an operation costs however small it
is, thin products, kernels that compute more than they read. So the time of every kind of part is measured
(`trials.profiling`), forward and backward apart, and fitted as a sum over its sizes (`dhen.memory.parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dhen.memory.parts import Part
from dhen.values import Value
from trials.cluster.shared_costs import SharedCosts

ANY = "any"
"""Kind that stands for those which were not measured: operations, traffic and FLOPs of all that were."""
UPDATE = "update"
"""Kind of the dense part's optimizer step: its sizes are 1, numbers of weights, numbers of tensors."""
LOSS = "loss"
"""Kind of the loss: its sizes are 1 and the examples."""
# the kind ADMISSION (`dhen.inputs.features`) has the sizes 1 and the ids of growing tables
BETWEEN = "between parts"
"""Kind of what a step takes beside its parts: its sizes are 1 and the operations of all."""
DECAYED = " with decay"
"""What the kind of a table update has behind it where all rows decay."""


class PartSeconds(NamedTuple):
    """Seconds of a part."""

    forward: float
    backward: float


class KindCost(Value):
    """What one kind of part takes."""

    forward: tuple[float, ...]
    """Seconds for one of each size, in forward's order of sizes."""
    backward: tuple[float, ...]


class PartCosts(Value):
    """What this machine takes, in one precision, with so many threads in so many processes at once."""

    precision: Literal["fp32", "bf16"]
    """Precision of the dense part."""
    threads: int
    """Threads of a process."""
    processes: int
    """Number of processes that computed at the same time."""
    kinds: dict[str, KindCost]
    shared: SharedCosts | None = None
    """What ranks that share a training take beside their parts, where that was measured."""

    def seconds(self, kind: str, sizes: Sequence[float]) -> PartSeconds:
        """Returns the seconds of a part of this kind; of one that was not measured, those of `ANY`."""
        cost = self.kinds.get(kind, self.kinds[ANY])
        return PartSeconds(dot(cost.forward, sizes), dot(cost.backward, sizes))

    def in_turns(self, times: float) -> PartCosts:
        """Returns what parts take where so many threads share a core: so many times as long."""

        def slower(seconds: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(times * each for each in seconds)

        kinds = {
            kind: KindCost(forward=slower(cost.forward), backward=slower(cost.backward))
            for kind, cost in self.kinds.items()
        }
        return self if times == 1.0 else self.replace(kinds=kinds)

    def of_part(self, part: Part, batch: int) -> PartSeconds:
        """Returns the seconds of a part for so many examples."""
        return self.seconds(part.kind, part.sizes(batch))


def dot(seconds: Sequence[float], sizes: Sequence[float]) -> float:
    """Returns the sum over sizes, each times its seconds."""
    return sum(each * size for each, size in zip(seconds, sizes, strict=True))
