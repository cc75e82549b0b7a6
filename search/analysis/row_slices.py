"""Which slice each row of a split falls into: the values of a column, or the tenths of a numeric one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.cache import PreparedLog, Split

TENTHS = 10
NOISE = 1e-6
"""Share of the largest value that fp32 does not resolve."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Slices of N rows."""

    group_N: NDArray[np.integer[Any]]
    names: tuple[str, ...]
    """Names by group: the largest first and the rest joined, or ascending for a numeric column."""


def groups_of(log: PreparedLog, split: Split, column: str, most: int) -> Groups:
    """Groups by the values of a categorical column (`most` of them, the others joined), or a numeric one's tenths.

    Raises:
        UserError: for a column that is neither.
    """
    ids = categorical_ids(log, split)
    if column in ids:
        return _by_value(log, column, ids[column], most)
    if column in log.schema.numeric:
        return _by_tenth(log.encoding.numbers(column, np.asarray(split.numeric)))
    columns = ", ".join((*ids, *log.schema.numeric))
    raise UserError(f"--column {column!r}: expected a categorical or numeric column of the log: {columns}.")


def categorical_ids(log: PreparedLog, split: Split) -> dict[str, NDArray[np.integer[Any]]]:
    """Views of the rows' ids (N) by categorical column, in the log's order; of growing tables the keys."""
    columns: dict[str, NDArray[np.integer[Any]]] = {
        table.name: np.asarray(split.categorical[:, index])
        for index, table in enumerate(log.features.categorical)
    }
    keys, tables = split.inputs.keys, log.features.categorical
    if keys is not None:
        growing = enumerate(log.features.growing_columns)
        columns |= {tables[column].name: np.asarray(keys[:, place]) for place, column in growing}
    return columns


def _by_value(log: PreparedLog, column: str, id_N: NDArray[np.integer[Any]], most: int) -> Groups:
    ids, index_N, counts = np.unique(id_N, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    names = log.encoding.value_names(column, ids[order[:most]].tolist())
    if len(ids) > most:
        names.append(f"({len(ids) - most} other{'s' if len(ids) - most > 1 else ''})")
    return Groups(group_N=np.minimum(rank, most)[index_N], names=tuple(names))


def _by_tenth(value_N: NDArray[np.float64]) -> Groups:
    missing_N = np.isnan(value_N)
    present = value_N[~missing_N]
    edges = np.unique(np.quantile(present, np.arange(1, TENTHS) / TENTHS)) if len(present) else present
    group_N = np.searchsorted(edges, value_N, side="left")
    group_N[missing_N] = len(edges) + 1
    groups, group_N = np.unique(group_N, return_inverse=True)
    known_N = _without_noise(value_N)
    names = [
        "(missing)" if group > len(edges) else _range(known_N[group_N == index])
        for index, group in enumerate(groups)
    ]
    return Groups(group_N=group_N, names=tuple(names))


def _without_noise(value_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values, with zeros where standardisation in fp32 has left almost zero."""
    small_N = np.abs(value_N) < NOISE * np.nanmax(np.abs(value_N), initial=0.0)
    return np.where(small_N, 0.0, value_N)


def _range(values: NDArray[np.float64]) -> str:
    low, high = f"{values.min():.4g}", f"{values.max():.4g}"
    return low if low == high else f"{low} to {high}"
