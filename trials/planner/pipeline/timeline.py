"""The bubble: a pipeline's passes played out on a clock for each rank, in the order in which they will run.

A pass begins when its rank has done the one before, and what it needs has arrived from the stage before it
(forward) or behind it (backward). With p equal stages, m micro-batches and nothing to send a rank computes for
m / (m + p - 1) of the time under GPipe and 1F1B.

Left out: that a send takes from the compute beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trials.planner.pipeline.orders import orders
from trials.strategy import Schedule


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float
    """Seconds of backward, recomputation included."""
    of_inputs: float
    """Seconds of the pass for inputs, where backward comes in two."""
    of_weights: float
    send: float
    """Seconds in which the stage's output reaches the next stage, and its gradient comes back."""


class Played(NamedTuple):
    """A step's passes on the clock."""

    seconds: float
    """Seconds from the first pass until the last one has ended."""
    busy: tuple[float, ...]
    """Seconds that each rank computes."""

    @property
    def efficiency(self) -> float:
        """Share of the time that the busiest rank computes."""
        return max(self.busy) / self.seconds


def played(schedule: Schedule, ranks: int, micro_batches: int, stages: Sequence[StageSeconds]) -> Played:
    """Plays the passes of all micro-batches; stages are in the model's order, stage s on rank s modulo `ranks`."""
    waiting = [list(reversed(passes)) for passes in orders(schedule, ranks, micro_batches)]
    clocks, busy, last = [0.0] * ranks, [0.0] * ranks, len(stages) - 1
    forward_done: list[dict[int, float]] = [{} for _ in stages]
    backward_done: list[dict[int, float]] = [{} for _ in stages]
    progress = True
    while progress:
        progress = False
        for rank, passes in enumerate(waiting):
            clock = clocks[rank]
            while passes:
                kind, stage, number = passes[-1]
                of, ready = stages[stage], 0.0
                if kind == "F":
                    if stage:
                        if number not in forward_done[stage - 1]:
                            break
                        ready = forward_done[stage - 1][number] + stages[stage - 1].send
                    seconds, done = of.forward, forward_done[stage]
                elif kind == "W":
                    seconds, done = of.of_weights, None
                else:
                    if stage < last:
                        if number not in backward_done[stage + 1]:
                            break
                        ready = backward_done[stage + 1][number] + of.send
                    seconds = of.backward if kind == "B" else of.of_inputs
                    done = backward_done[stage]
                clock = (ready if ready > clock else clock) + seconds
                busy[rank] += seconds
                if done is not None:
                    done[number] = clock
                passes.pop()
                progress = True
            clocks[rank] = clock
    assert not any(waiting), "no schedule waits for itself"
    return Played(max(clocks), tuple(busy))
