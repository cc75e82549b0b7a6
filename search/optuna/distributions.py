"""A space's axes as distributions of Optuna, in the values that people know: `embedding_dim` is 16, not its place.

What the samplers are given (`spaces/axes.py`) counts places in a list, so that a list may grow within one Optuna
study; nobody could read that in a chart. Here a choice of numbers is a range between its ends, which may grow too.
All other choices are categorical; where one of them grows, the mirror is made anew
(docs/decisions/0040-optuna-mirror.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from spaces.axes import Axis, Choice, is_number, label
from spaces.space import Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Returns a distribution for each axis of the space, by name, in the order of sampling.

    Args:
        space: the space, as wide as the study has made it.
    """
    return {axis.name: distribution(axis) for axis in space.axes}


def distribution(axis: Axis) -> BaseDistribution:
    """Returns the distribution of one axis, over the values that stand in a point."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, Choice):
        if axis.ascending and all(map(is_number, axis.values)):
            return _between(axis.ascending)
        return CategoricalDistribution([label(value) for value in axis.ascending or axis.values])
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=axis.step)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _between(numbers: Sequence[float]) -> BaseDistribution:
    """The range between the ends of a choice of numbers; whole ones in the widest steps that have them all."""
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high = numbers[0], numbers[-1]
    if all(isinstance(number, int) for number in numbers):
        step = math.gcd(*(int(right - left) for left, right in pairwise(numbers)))
        return IntDistribution(int(low), int(high), step=step)
    return FloatDistribution(low, high)
