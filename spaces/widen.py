"""The next value beyond an end of an axis, in the axis's own steps."""

from __future__ import annotations

import math
from typing import Any

from spaces.axes import Axis, Choice, Range, Scalar, label

DOUBLE = 2
"""Factor between two sizes, such as lengths and widths."""
SHARE = 0.5
"""Length that is added to a range, over its length so far, both on its own scale: an assumption, not measured."""
COUNTS_LAYERS = ("depth", "layers")
"""Settings that are numbers of layers, which grow by one."""
DIGITS = 3
"""Significant digits of new real numbers: 0.1 and 0.2 make 0.3."""


def value_beyond(axis: Axis, *, highest: bool) -> Any:
    """The next value above the highest one, or below the lowest one; None where there is none in the axis's steps.

    Numbers of layers change by one. Of a choice, widths double, and so do whole numbers where the last two are
    that far apart; real numbers that differ by a factor of two or more go on by that factor, others by the last
    difference. A range becomes longer by half. Whether a model may have the value is not asked here.
    """
    if isinstance(axis, Range):
        return _new_end(axis, highest=highest)
    ascending = axis.ascending if highest else axis.ascending[::-1]
    inner, end = ascending[-2:]
    if isinstance(end, tuple):
        widths = tuple(_times(width, DOUBLE, highest) for width in end)
        return widths if widths != end and min(widths) > 0 else None
    value = _next_number(inner, end, counts_layers=_counts_layers(axis), highest=highest)
    return value if value != end else None


def first_label_beyond(axis: Axis, value: Any, *, highest: bool) -> Scalar:
    """Where the first candidate beyond an end should be: at the new value, on a range half way to its new end."""
    if isinstance(axis, Choice):
        return label(value)
    end = axis.high if highest else axis.low
    if axis.whole:
        return int(end) + (axis.step if highest else -axis.step)
    return math.sqrt(end * value) if axis.log else (end + value) / 2


def _next_number(inner: float, end: float, *, counts_layers: bool, highest: bool) -> float:
    if counts_layers:
        return end + 1 if highest else end - 1
    whole = isinstance(inner, int) and isinstance(end, int)
    low, high = sorted((inner, end))
    if low > 0 and high / low >= DOUBLE:
        return _times(end, DOUBLE if whole else high / low, highest)
    return _rounded(end + (end - inner))


def _new_end(axis: Range, *, highest: bool) -> float | None:
    low, high = axis.low, axis.high
    if low == high:
        return None
    end = high if highest else low
    if _counts_layers(axis):
        step = float(axis.step)
    elif axis.log:
        factor = (high / low) ** SHARE
        new = _times(end, min(factor, DOUBLE) if axis.whole else factor, highest)
        return new if new != end and new > 0 else None
    else:
        step = SHARE * (high - low)
        if axis.whole:
            step = axis.step * max(1, round(step / axis.step))
    new = _rounded(end + step if highest else end - step)
    return round(new) if axis.whole else new


def _times(number: float, factor: float, highest: bool) -> float:
    """The number multiplied or divided by a factor; a whole one stays whole."""
    new = number * factor if highest else number / factor
    return int(new) if isinstance(number, int) else _rounded(new)


def _counts_layers(axis: Axis) -> bool:
    return axis.name.split(".")[-1] in COUNTS_LAYERS


def _rounded(number: float) -> float:
    return number if isinstance(number, int) else float(f"{number:.{DIGITS}g}")
