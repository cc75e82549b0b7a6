"""Recognises columns of text that hold several values per row."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from trials.data.roles.sample import ColumnSample

_DISTINCTIVE = ("|", "^")
"""Separators that hardly occur within a value."""
_COMMON = (";", ",", " ")
"""Separators that also occur in plain text: the values must then be made of far fewer parts."""


def separator_of(column: ColumnSample) -> str | None:
    """Returns what separates the values, or None for a column with one value per row."""
    candidates = (*_DISTINCTIVE, *_COMMON)
    return next((separator for separator in candidates if _separates(column, separator)), None)


def _separates(column: ColumnSample, separator: str) -> bool:
    split_values = pc.split_pattern(column.values, separator)
    numbers = pc.list_value_length(split_values).to_numpy(zero_copy_only=False)
    several = float(np.dot(numbers > 1, column.counts)) / max(1, column.known)
    if several < (0.05 if separator in _DISTINCTIVE else 0.2) or len(np.unique(numbers)) == 1:
        return False
    distinct_parts = len(pc.unique(pc.utf8_trim_whitespace(split_values.flatten())))
    needed = 1.0 if separator in _DISTINCTIVE else 2.0
    return column.distinct >= needed * distinct_parts
