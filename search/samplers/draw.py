"""Points that may be proposed: new ones, from the whole space and near good candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from search.pareto import log_flops
from search.samplers.static_cost import CandidatePricer, PricedCandidate
from spaces.axes import Axis, Range, Scalar, random_value
from spaces.space import Point, Space

TRIES = 50
"""Number of known points in a row after which there seems to be nothing new to draw, since a space may be small:
an assumption, not measured."""
MOST_OVER = 1000
"""Number of drawn points over a limit of serving or of table bytes after which no more are drawn, since limits may
leave little: an assumption, not measured."""
MOST_CHANGED = 4
"""Largest number of axes in which a point near another differs from it: an assumption, not measured."""
STEP = 0.15
"""Standard deviation of a change of a number, over its range: an assumption, not measured."""


@dataclass(frozen=True)
class DrawnPoint:
    """A point and what is known of it without training."""

    point: Point
    priced: PricedCandidate

    @property
    def log_flops(self) -> float:
        """Log FLOPs of the candidate, the front's first axis."""
        return log_flops(self.priced.flops)


def evenly(
    pricer: CandidatePricer, taken: set[str], rng: random.Random, fixed: Point
) -> Iterator[DrawnPoint]:
    """New points from the whole space with the values of `fixed`; their fingerprints join `taken` as they come."""
    return _new(pricer, lambda: pricer.space.random_point(rng) | fixed, taken)


def near(
    pricer: CandidatePricer, good: Sequence[Point], taken: set[str], rng: random.Random, fixed: Point
) -> Iterator[DrawnPoint]:
    """New points with the values of `fixed` that differ from a good point in a few other axes."""
    return _new(pricer, lambda: neighbour(pricer.space, rng.choice(good) | fixed, rng, fixed), taken)


def neighbour(space: Space, point: Point, rng: random.Random, fixed: Point) -> Point:
    """The point with some axes changed that are not fixed: choices drawn anew, numbers moved a little."""
    free = [axis for axis in space.axes if axis.name not in fixed]
    if not free:
        return point
    count = rng.randint(1, min(MOST_CHANGED, len(free)))
    changed = rng.sample(free, count)
    return point | {axis.name: _moved(axis, point[axis.name], rng) for axis in changed}


def _new(pricer: CandidatePricer, draw: Callable[[], Point], taken: set[str]) -> Iterator[DrawnPoint]:
    fruitless = over = 0
    while fruitless < TRIES and over < MOST_OVER:
        point = draw()
        priced = pricer.price(point)
        if priced is not None and not pricer.is_within_limits(priced):
            over += 1
            continue
        fruitless += 1
        if priced is not None and priced.fingerprint not in taken:
            taken.add(priced.fingerprint)
            fruitless = 0
            yield DrawnPoint(point, priced)


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
