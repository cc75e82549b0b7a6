"""Which axes of a space are ordered, from less to more, and whether a wider space could go beyond their ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from dhen.blocks import BLOCKS
from dhen.config import DhenConfig, LayerConfig
from spaces.axes import Axis, Choice, is_number, label
from spaces.space import MOST_LAYERS, Space
from trials.job import TrainingConfig
from trials.ordered_axis import DEPTH, OrderedAxis

LEFT_OUT = ("members_from",)
"""Settings that are numbers of layers, and bound by the depth alone."""


def ordered_axes(space: Space) -> tuple[OrderedAxis, ...]:
    """The axes of a space that are ranges, or choices of numbers or widths, in the order of sampling."""
    return tuple(_all(space))


def _all(space: Space) -> Iterator[OrderedAxis]:
    yield from _read(space, space.depth, {}, None, part=DEPTH, key=DEPTH)
    for index, axes in enumerate(space.layer_axes.values()):
        for name, axis in axes.items():
            kind, _, key = name.rpartition(".")
            fields = BLOCKS[kind].model_fields if kind else LayerConfig.model_fields
            if key in fields:  # a slot's kind is none
                yield from _read(space, axis, fields, kind or None, part="layer", key=key, layer=index)
    for key, axis in space.model_axes.items():
        if key not in LEFT_OUT:
            yield from _read(space, axis, DhenConfig.model_fields, None, part="model", key=key)
    for key, axis in space.training_axes.items():
        yield from _read(space, axis, TrainingConfig.model_fields, None, part="training", key=key)


def _read(
    space: Space, axis: Axis, fields: Mapping[str, FieldInfo], kind: str | None, **where: Any
) -> Iterator[OrderedAxis]:
    """The axis as an ordered one; nothing where it is none, or has one value."""
    values = axis.ascending if isinstance(axis, Choice) else ()
    if axis.size == 1 or (isinstance(axis, Choice) and not values):
        return
    field = fields.get(where["key"])
    least, most = (1.0, float(MOST_LAYERS)) if field is None else _limits(field)
    low, high = (values[0], values[-1]) if isinstance(axis, Choice) else (axis.low, axis.high)
    ends = {} if isinstance(axis, Choice) else {"low": axis.low, "high": axis.high, "log": axis.log}
    default = None if field is None else field.get_default(call_default_factory=True)
    yield OrderedAxis(
        name=axis.name,
        kind=kind,
        values=tuple(map(label, values)),
        default=default if is_number(default) else None,
        open_below=low > least if is_number(low) else low != (),
        open_above=high < most if is_number(high) else True,
        tuned_last=axis.name in space.left_for_tuning,
        **ends,
        **where,
    )


def _limits(field: FieldInfo) -> tuple[float, float]:
    """The lowest and the highest value that a setting may have at all; a whole number above 0 begins at 1."""
    least, most = -math.inf, math.inf
    step = 1 if field.annotation is int else 0
    for limit in field.metadata:
        least = max(least, getattr(limit, "ge", -math.inf), getattr(limit, "gt", -math.inf) + step)
        most = min(most, getattr(limit, "le", math.inf), getattr(limit, "lt", math.inf) - step)
    return least, most
