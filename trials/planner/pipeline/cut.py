"""Where a model is cut into the stages of a pipeline: so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def stages_of(layers_per_stage: Sequence[int]) -> list[range]:
    """Returns the layers of each stage, from their numbers."""
    return [range(start, stop) for start, stop in pairwise(accumulate(layers_per_stage, initial=0))]


@lru_cache(maxsize=4096)
def layers_per_stage(seconds: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage, one at least, of which the slowest takes the fewest seconds.

    Args:
        seconds: seconds of each segment: features, which are the first stage's, the layers, and the head, which
            is the last stage's.
        stages: number of stages, at most that of the layers.
    """
    layers = len(seconds) - 2
    assert 1 <= stages <= layers
    before = [0.0, *accumulate(seconds[1:-1])]

    def taken(start: int, stop: int) -> float:
        ends = seconds[0] * (start == 0) + seconds[-1] * (stop == layers)
        return before[stop] - before[start] + ends

    # for the first layers, by their number: seconds of the slowest stage, and the layers of each
    slowest: dict[int, tuple[float, tuple[int, ...]]] = {
        stop: (taken(0, stop), (stop,)) for stop in range(1, layers - stages + 2)
    }
    for stage in range(1, stages):
        slowest = {
            stop: min(
                (max(slowest[start][0], taken(start, stop)), (*slowest[start][1], stop - start))
                for start in range(stage, stop)
                if start in slowest
            )
            for stop in range(stage + 1, layers - stages + stage + 2)
        }
    return slowest[layers][1]
