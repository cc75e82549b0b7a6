"""Points that may be proposed: new ones, from the whole space and near good candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from search.pareto import log_flops
from search.samplers.static_cost import Appraisal, Appraiser
from spaces.axes import Axis, Range, Scalar, random_value
from spaces.catalog_loader import random_point
from spaces.space import Point, Space

TRIES = 50
"""Points drawn in a row that are all known, after which there seems to be nothing new, since a space may be small:
an assumption, not measured."""
MOST_OVER = 1000
"""Points drawn that are over a limit of serving, after which no more are drawn, since limits may leave little: an
assumption, not measured."""
MOST_CHANGED = 4
"""Axes that a point near another differs in, at most: an assumption, not measured."""
STEP = 0.15
"""Standard deviation of a change of a number, over its range: an assumption, not measured."""


@dataclass(frozen=True)
class Drawn:
    """A point and what is known of it without training."""

    point: Point
    appraisal: Appraisal

    @property
    def log_flops(self) -> float:
        """Log FLOPs of the candidate, the front's first axis."""
        return log_flops(self.appraisal.flops)


def evenly(appraiser: Appraiser, taken: set[str], rng: random.Random, fixed: Point) -> Iterator[Drawn]:
    """New points from the whole space with the values of `fixed`; their fingerprints are taken as they come."""
    return _new(appraiser, lambda: random_point(appraiser.space, rng) | fixed, taken)


def near(
    appraiser: Appraiser, good: Sequence[Point], taken: set[str], rng: random.Random, fixed: Point
) -> Iterator[Drawn]:
    """New points with the values of `fixed` that differ from a good one in a few other axes."""
    return _new(appraiser, lambda: neighbour(appraiser.space, rng.choice(good) | fixed, rng, fixed), taken)


def neighbour(space: Space, point: Point, rng: random.Random, fixed: Point) -> Point:
    """The point with some axes changed that are not fixed: choices drawn anew, numbers moved a little."""
    free = [axis for axis in space.axes if axis.name not in fixed]
    count = rng.randint(1, min(MOST_CHANGED, len(free)))
    changed = rng.sample(free, count)
    return point | {axis.name: _moved(axis, point[axis.name], rng) for axis in changed}


def _new(appraiser: Appraiser, draw: Callable[[], Point], taken: set[str]) -> Iterator[Drawn]:
    fruitless = over = 0
    while fruitless < TRIES and over < MOST_OVER:
        point = draw()
        appraisal = appraiser.appraise(point)
        if appraisal is not None and not appraiser.serves(appraisal):
            over += 1
            continue
        fruitless += 1
        if appraisal is not None and appraisal.fingerprint not in taken:
            taken.add(appraisal.fingerprint)
            fruitless = 0
            yield Drawn(point, appraisal)


def _moved(axis: Axis, value: Scalar, rng: random.Random) -> Scalar:
    if not isinstance(axis, Range) or axis.whole:
        return random_value(axis, rng)
    assert isinstance(value, (int, float))
    if axis.log:
        span = math.log(axis.high / axis.low)
        moved = value * math.exp(rng.gauss(0.0, STEP * span))
    else:
        moved = value + rng.gauss(0.0, STEP * (axis.high - axis.low))
    return min(max(moved, axis.low), axis.high)
