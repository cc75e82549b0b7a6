"""Axis: one thing that may vary, its name and its values.

A YAML list is a choice, a mapping with `low` and `high` a range (whole numbers if both are whole;
`log: true` for a logarithmic scale, `step` for whole numbers), anything else a constant.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dhen.errors import UserError

if TYPE_CHECKING:
    from optuna.trial import BaseTrial


Scalar = None | bool | int | float | str
RANGE_KEYS = {"low", "high", "log", "step"}


class OutsideError(UserError):
    """A value that an axis does not have."""

    def __init__(self, axis: str, value: Any) -> None:
        super().__init__(f"{axis}: {value!r} lies outside this space.")
        self.shortly = axis if isinstance(value, float) else f"{axis}: {value!r}"
        """The message in short, for counting: the same for all real numbers."""


@dataclass(frozen=True, kw_only=True)
class ChoiceAxis:
    """One of a few values. In a point a value is represented by its label, so that lists can be chosen among.

    To Optuna a choice of ordered values is a whole number: how many values lie between it and the one that is
    listed first. Values that are added beyond the ends, and listed last, leave this number of all others as it
    is; a categorical distribution must not change within a study.
    """

    name: str
    values: tuple[Any, ...]

    @cached_property
    def labels(self) -> tuple[Scalar, ...]:
        """What stands in a point for each value: scalars as they are, lists as `128-64`."""
        return tuple(label(value) for value in self.values)

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.values)

    @cached_property
    def ascending(self) -> tuple[Any, ...]:
        """The values from the lowest to the highest; none if they have no order.

        Widths of MLPs have one if each next MLP has as many layers or more, and none that is narrower.
        """
        if all(map(is_number, self.values)):
            return tuple(sorted(self.values))
        if not all(isinstance(value, tuple) and all(map(is_number, value)) for value in self.values):
            return ()
        widths = sorted(self.values, key=lambda value: (len(value), value))
        rising = all(all(a <= b for a, b in zip(low, high, strict=False)) for low, high in pairwise(widths))
        return tuple(widths) if rising else ()

    def sample(self, trial: BaseTrial) -> Scalar:
        """The label that the trial suggests."""
        if not self.ascending:
            choice: Scalar = trial.suggest_categorical(self.name, self.labels)
            return choice
        first = self.ascending.index(self.values[0])
        place = trial.suggest_int(self.name, -first, self.size - 1 - first)
        return label(self.ascending[first + place])

    def for_optuna(self, received: Scalar) -> Scalar:
        """What a label is to Optuna."""
        if not self.ascending:
            return received
        return self.ascending.index(self.decode(received)) - self.ascending.index(self.values[0])

    def decode(self, received: Scalar) -> Any:
        """The value of a label."""
        if received not in self.labels:
            raise UserError(f"{self.name}: {received!r} is not one of {list(self.labels)}.")
        return self.values[self.labels.index(received)]

    @property
    def first(self) -> Scalar:
        """The label in a point by default."""
        return self.labels[0]

    def has(self, value: Any) -> bool:
        """Whether the axis has this value, be it as its constant."""
        return value in self.values

    def encode(self, value: Any) -> Scalar:
        """The label of a value."""
        if value not in self.values:
            raise OutsideError(self.name, value)
        return self.labels[self.values.index(value)]


@dataclass(frozen=True, kw_only=True)
class RangeAxis:
    """A number between two bounds, both included."""

    name: str
    low: float
    high: float
    log: bool = False
    step: int = 1
    whole: bool = False

    @property
    def size(self) -> float:
        """Number of values; infinite for real ones between two bounds."""
        if self.low == self.high:
            return 1
        return int((self.high - self.low) // self.step) + 1 if self.whole else math.inf

    def sample(self, trial: BaseTrial) -> Scalar:
        """The number that the trial suggests."""
        if self.whole:
            number: Scalar = trial.suggest_int(
                self.name, int(self.low), int(self.high), log=self.log, step=self.step
            )
            return number
        real: Scalar = trial.suggest_float(self.name, self.low, self.high, log=self.log)
        return real

    def for_optuna(self, received: Scalar) -> Scalar:
        """The number itself."""
        return received

    def decode(self, received: Scalar) -> Any:
        """The number itself, if it lies between the bounds."""
        if not self.has(received):
            raise UserError(f"{self.name}: {received!r} is not between {self.low} and {self.high}.")
        return received

    @property
    def first(self) -> Scalar:
        """The number in a point by default."""
        return self.low

    def has(self, value: Any) -> bool:
        """Says whether the value lies between the bounds, on a step, be it the only one."""
        if not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        return not self.whole or (value - self.low) % self.step == 0

    def encode(self, value: Any) -> Scalar:
        """The number itself."""
        if not self.has(value):
            raise OutsideError(self.name, value)
        number: Scalar = value
        return number


Axis = ChoiceAxis | RangeAxis


def read_axis(name: str, spec: Any) -> Axis:
    """An axis from YAML; a constant is a choice of one.

    Raises:
        UserError: naming the axis, for an empty list, repeated values, values that cannot be chosen, and for
            bounds or a step that are not valid.
    """
    if isinstance(spec, dict):
        return _read_range(name, spec)
    values = tuple(_frozen(value) for value in spec) if isinstance(spec, list) else (spec,)
    if not values:
        raise UserError(f"space: {name} has no values to choose among; give at least one.")
    if not all(map(_has_label, values)):
        raise UserError(
            f"space: {name} may be finite numbers, words, true, false, null, or lists of these; received {spec}."
        )
    if len(set(map(label, values))) < len(values):
        raise UserError(f"space: {name} lists a value twice: {spec}.")
    return ChoiceAxis(name=name, values=values)


def random_value(axis: Axis, rng: random.Random) -> Scalar:
    """A value of the axis, drawn evenly (on the axis's own scale)."""
    if isinstance(axis, ChoiceAxis):
        return rng.choice(axis.labels)
    if axis.whole and axis.log:  # each number's share of the scale lies around it
        drawn = math.exp(rng.uniform(math.log(axis.low - 0.5), math.log(axis.high + 0.5)))
        return min(max(round(drawn), int(axis.low)), int(axis.high))
    if axis.whole:
        return rng.randrange(int(axis.low), int(axis.high) + 1, axis.step)
    if axis.log:
        return math.exp(rng.uniform(math.log(axis.low), math.log(axis.high)))
    return rng.uniform(axis.low, axis.high)


def label(value: Any) -> Scalar:
    """What stands for a value in a point."""
    if isinstance(value, tuple):
        return "-".join(str(item) for item in value) or "none"
    return value  # type: ignore[no-any-return]


def is_number(value: Any) -> bool:
    """Whether the value is a finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _read_range(name: str, spec: dict[str, Any]) -> RangeAxis:
    low, high = spec.get("low"), spec.get("high")
    if set(spec) - RANGE_KEYS or not (is_number(low) and is_number(high)):
        raise UserError(
            f"space: {name} is a range and needs finite numbers `low` and `high` (and may have `log`, `step`); "
            f"received {spec}."
        )
    assert low is not None
    assert high is not None
    log = spec.get("log", False)
    if not isinstance(log, bool):
        raise UserError(f"space: {name} has log={log!r}; true or false would work.")
    if low > high or (log and low <= 0):
        raise UserError(
            f"space: {name} has low={low}, high={high}; low must not exceed high, "
            f"and a logarithmic range starts above 0."
        )
    whole = isinstance(low, int) and isinstance(high, int)
    step = spec.get("step", 1)
    is_count = isinstance(step, int) and not isinstance(step, bool) and step > 0
    if "step" in spec and not (is_count and whole and (step == 1 or not log)):
        raise UserError(
            f"space: {name}: `step` is a whole number above 0, for whole `low` and `high` and no logarithmic "
            f"scale; received {spec}."
        )
    return RangeAxis(name=name, low=low, high=high, log=log, step=step, whole=whole)


def _has_label(value: Any) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return all(item is None or isinstance(item, (bool, str)) or is_number(item) for item in items)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


# The next value beyond an end of an axis, in the axis's own steps.

DOUBLE = 2
"""Factor between two sizes, such as lengths and widths."""
SHARE = 0.5
"""Length that is added to a range, over its length so far, both on its own scale: an assumption, not measured."""
COUNTS_LAYERS = ("depth", "layers")
"""Settings that are numbers of layers, which grow by one."""
DIGITS = 3
"""Significant digits of new real numbers: 0.1 and 0.2 make 0.3."""


def value_beyond(axis: Axis, *, highest: bool) -> Any:
    """The next value above the highest one, or below the lowest one; None if there is none in the axis's steps.

    Numbers of layers change by one. Of a choice, widths double, and so do whole numbers if the last two are
    that far apart; real numbers that differ by a factor of two or more go on by that factor, others by the last
    difference. A range becomes longer by half. Whether a model may have the value is not asked here.
    """
    if isinstance(axis, RangeAxis):
        return _new_end(axis, highest=highest)
    ascending = axis.ascending if highest else axis.ascending[::-1]
    inner, end = ascending[-2:]
    if isinstance(end, tuple):
        widths = tuple(_times(width, DOUBLE, highest) for width in end)
        return widths if widths != end and min(widths) > 0 else None
    low, high = sorted((inner, end))
    if _counts_layers(axis):
        value = end + 1 if highest else end - 1
    elif low > 0 and high / low >= DOUBLE:
        whole = isinstance(inner, int) and isinstance(end, int)
        value = _times(end, DOUBLE if whole else high / low, highest)
    else:
        value = _rounded(end + (end - inner))
    return value if value != end else None


def first_label_beyond(axis: Axis, value: Any, *, highest: bool) -> Scalar:
    """Where the first candidate beyond an end should be: at the new value, on a range half way to its new end."""
    if isinstance(axis, ChoiceAxis):
        return label(value)
    end = axis.high if highest else axis.low
    if axis.whole:
        return int(end) + (axis.step if highest else -axis.step)
    return math.sqrt(end * value) if axis.log else (end + value) / 2


def _new_end(axis: RangeAxis, *, highest: bool) -> float | None:
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
