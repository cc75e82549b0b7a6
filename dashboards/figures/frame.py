"""The range of an axis that shows what matters: a few bad values must not press the rest flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

MARGIN = 0.06
"""Room left at either end, as a share of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A range, and how many of the values lie above it."""

    low: float
    high: float
    above: int


def frame(values: Sequence[float], always: Sequence[float] = ()) -> Frame:
    """The range from the lowest value up to Tukey's upper fence (third quartile + 1.5 interquartile ranges).

    `always` are values that are inside whatever the fence says. Lower is better here: nothing is ever cut
    off below. At least one value is needed.
    """
    inside = sorted(values)
    if len(inside) >= 4:
        first, _, third = quantiles(inside, n=4, method="inclusive")
        fence = third + 1.5 * (third - first)
        inside = [value for value in inside if value <= fence]
    shown = [*inside, *always]
    low, high = min(shown), max(shown)
    margin = MARGIN * (high - low) or abs(high) * 0.01 or 1.0
    top = high + margin
    return Frame(low=low - margin, high=top, above=sum(value > top for value in values))
