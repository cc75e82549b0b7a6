"""What ranks that share a training take on a CPU beside the parts of their models: engines, tables, counting.

An engine is how the dense part is held (`trials.strategy`), with gloo beneath it. What it takes is measured on so
many ranks at once (`trials.profiling.on_ranks`), and fitted as a sum over sizes. Nothing of it hides behind
compute: it is what steps take longer than the same compute without an engine.
"""

from __future__ import annotations

from pydantic import Field

from dhen.values import Value


def _slower(seconds: tuple[float, ...], times: float) -> tuple[float, ...]:
    return tuple(times * each for each in seconds)


class EngineCost(Value):
    """Seconds that an engine takes for one of each size: 1, units (layers, and the rest together), tensors, and
    numbers of the dense part."""

    passes: tuple[float, ...]
    """Seconds of forward and backward of a micro-batch whose gradients wait for another one."""
    reduced: tuple[float, ...]
    """Seconds that a micro-batch takes beside that where gradients are reduced."""
    update: tuple[float, ...]
    """Seconds of the dense part's update, with what is handed out after it."""


class SharedCosts(Value):
    """What ranks of one training take on this machine, all of them at once."""

    ranks: str
    """Hosts and ranks per host, such as `2x2`, all on this machine."""
    engines: dict[str, EngineCost]
    """What each way to hold the dense part takes, by its name in strategies."""
    waits: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Seconds that a step takes beside its compute, its engine and its tables, for 1, for each second of compute
    and for each number of the dense part: ranks wait for the slowest of them, and what a large model has left
    in caches is nothing that tables need."""
    tables: tuple[float, ...] | None = None
    """Seconds of lookup and update of tables, beside what a lookup without other ranks takes, for one of each size
    (`trials.planner.time.shared_time.table_sizes`); None where TorchRec is missing."""
    counted: bool = False
    """Whether ranks count their memory, as with a declared one (`trials.memory.limit`)."""
    counting: tuple[float, ...] = (0.0, 0.0)
    """Seconds that counting takes of forward and backward, for 1 and for each operation."""
    collectives: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Seconds of what tensor groups send, `all_reduce` and `all_gather`, for 1 and for each byte of the whole
    tensor."""

    def in_turns(self, times: float) -> SharedCosts:
        """Returns what ranks take where other trainings' take turns with them: so many times as long."""
        engines = {
            name: EngineCost(
                passes=_slower(cost.passes, times),
                reduced=_slower(cost.reduced, times),
                update=_slower(cost.update, times),
            )
            for name, cost in self.engines.items()
        }
        tables = None if self.tables is None else _slower(self.tables, times)
        one, compute, number = self.waits
        waits = (times * one, compute, times * number)
        counting = _slower(self.counting, times)
        collectives = {kind: (times * one, times * byte) for kind, (one, byte) in self.collectives.items()}
        return self.replace(
            engines=engines, waits=waits, tables=tables, counting=counting, collectives=collectives
        )
