"""Recognises columns of text that hold several values per row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trials.data.log_schema import MultiHotColumn
from trials.data.raw.text import without_weights
from trials.data.roles.sample import ColumnSample

_CONTROL = tuple(map(chr, (0x1D, 0x03, 0x01, 0x02, 0x1E, 0x1F, 0x1C, 0x04, 0x05, 0x09)))
"""Separators that are never part of a value: those of Hive, MaxCompute and ASCII."""
_DISTINCTIVE = ("|", "^", " > ", "#", "~")
"""Separators that hardly occur within a value."""
_COMMON = (";", ",", "/", "&", "+", " ")
"""Separators that also occur in plain text: the values must then be made of far fewer parts."""
_LEAST_SEVERAL = {_CONTROL: 0.01, _DISTINCTIVE: 0.05, _COMMON: 0.2}
"""Share of the rows that must have several values."""
_WEIGHTED = r"^(?P<value>[^:=]+)(?P<mark>[:=])[+-]?(?:\d*\.\d+|\d+)(?:[eE][+-]?\d+)?$"


def bag_of(column: ColumnSample) -> MultiHotColumn | None:
    """Returns how the values are separated, or None for a column with one value per row."""
    for kind, least_several in _LEAST_SEVERAL.items():
        for separator in kind:
            if pc.any(pc.match_substring(column.values, separator)).as_py():
                bag = _separated_by(separator, column, least_several)
                if bag is not None:
                    return bag
    return None


def _separated_by(separator: str, column: ColumnSample, least_several: float) -> MultiHotColumn | None:
    split_values = pc.split_pattern(column.values, separator)
    parts = pc.utf8_trim_whitespace(split_values.flatten())
    whole = pc.not_equal(parts, "")
    value_of_part = pc.list_parent_indices(split_values).filter(whole).to_numpy(zero_copy_only=False)
    numbers = np.bincount(value_of_part, minlength=column.distinct)
    several = float(np.dot(numbers > 1, column.counts)) / max(1, column.known)
    if several < least_several or (len(np.unique(numbers)) == 1 and separator not in _CONTROL):
        return None
    parts = parts.filter(whole)
    mark = _weight_mark(parts, len(split_values))
    if mark is not None:
        parts = without_weights(parts, mark)
    needed = 2.0 if separator in _COMMON else 0.0 if separator in _CONTROL else 1.0
    if column.distinct < needed * len(pc.unique(pa.array(parts))):
        return None
    return MultiHotColumn(separator=separator, weight_mark=mark)


def _weight_mark(parts: pa.Array, bags: int) -> str | None:
    """Returns what is between values and their weights; None if they have none.

    Weights are fractions, or belong to values that come and go: keys that nearly all bags have, as in
    `age:3|sex:1`, are a part of the value.
    """
    weighted = pc.extract_regex(parts, _WEIGHTED)
    if weighted.null_count >= 0.05 * len(parts):
        return None
    fractions = pc.mean(pc.match_substring_regex(parts, r"\d\.\d")).as_py() or 0.0
    most = pc.max(pc.value_counts(pc.struct_field(weighted, "value")).field("counts")).as_py()
    if fractions <= 0.5 and most > 0.5 * bags:
        return None
    return str(pc.struct_field(weighted, "mark").drop_null()[0])
