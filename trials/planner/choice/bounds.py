"""What a strategy takes at least, in seconds and in bytes, from what is known without a model's parts.

To price a strategy that splits modules the model has to be written down as one of its tensor ranks has it, for
each degree anew; to price one with a pipeline its passes are played. Bounds need neither: they are of what the
whole model takes on one rank, of which a tensor rank has at least its equal part, and of equal shares of a
pipeline's ranks. What they leave out is never below 0: what ranks send each other, the update, activations, what
stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from dhen.memory.tape import FP32_BYTES
from trials.optim.adamw import MOMENTS
from trials.planner.live_memory import Itemsizes
from trials.planner.segments import Segment
from trials.planner.time.compute_time import BACKWARD_PASSES, from_sizes
from trials.planner.time.step_time import Step, segment_seconds
from trials.strategy import RECOMPUTED, Strategy

ROUNDING = 1e-9
"""Share by which sums of the same seconds in another order may differ."""
IN_ORDER = ("1f1b", "gpipe")
"""Schedules whose stages go backward in one pass each, so that the first to go back is one of the last stage."""


class ComputeBounds:
    """Seconds of one micro-batch's compute in a model, whatever its size."""

    def __init__(self, step: Step, segments: Sequence[Segment], tensor: int) -> None:
        """Takes the step of a micro-batch on ranks that split nothing, and the model's segments; a tensor rank has
        all of features, and of any other at least its part of what depends on sizes."""
        on_cpu = step.cluster.device == "cpu"
        starts = [from_sizes(0.0, segment, step.cluster) for segment in segments]

        def at_least(whole: float, start: float) -> float:
            return start + (whole - start) / tensor if on_cpu else max(start, whole / tensor)

        passes = segment_seconds(step)
        self.forward = [at_least(whole, start) for (whole, _), start in zip(passes, starts, strict=True)]
        self.backward = [
            at_least(whole, BACKWARD_PASSES * start) for (_, whole), start in zip(passes, starts, strict=True)
        ]
        self.forward[0], self.backward[0] = passes[0]
        self.besides = 0.0 if on_cpu else step.besides


def least_seconds(compute: ComputeBounds, strategy: Strategy, beside: float) -> float:
    """Returns a number of seconds that no step takes less than.

    Args:
        compute: of one micro-batch.
        strategy: how the model is held.
        beside: seconds beside compute that any strategy takes.
    """
    again = sum(compute.forward[1:-1][RECOMPUTED[strategy.checkpointing]])
    forward, backward = sum(compute.forward) + compute.besides, sum(compute.backward) + again
    once, stages = forward + backward, strategy.pipeline
    least = strategy.micro_batches * once / stages
    if stages > 1 and strategy.schedule in IN_ORDER:
        # the first micro-batch comes back to a stage, which then has the others' backward before it
        least = max(least, once + (strategy.micro_batches - 1) * backward / stages)
    return (1 - ROUNDING) * (least + beside)


def least_state_bytes(numbers: int, strategy: Strategy, itemsizes: Itemsizes, data_ranks: int) -> int:
    """Returns the bytes of weights, gradients and optimizer state that the fullest rank has at least, where a
    model of so many numbers is split and cut."""
    computed, _, moment = itemsizes
    own = numbers // strategy.model_ranks
    masters = FP32_BYTES if computed != FP32_BYTES else 0
    state = masters + len(MOMENTS) * moment
    if strategy.dense == "zero1":
        return 2 * computed * own + state * (own // data_ranks)
    return (2 * computed + state) * own
