"""Tables below the device, in host memory or on an SSD: the cache of their rows, and what it costs.

A cache has at least the rows of one batch, and otherwise what is left of the device's memory; each matrix of
tables has its share. How often a row is found there depends on how unevenly ids occur, which a schema does not
tell: ids are taken to follow Zipf's law with exponent 1 over the rows of their table, as ids of click logs about
do.

Shapes: R rows of a table, C of them in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dhen.inputs.table_dims import TableGroup
from dhen.schema import Table
from trials.planner.tables.table_cost import ONE_PROCESS_ROW_STATE_BYTES
from trials.strategy import KIB, Strategy

INDEX_BYTES = 4 + 4
"""Host memory for each row below the device: where it is in the cache, and how often it has occurred."""
STORED_STATE_BYTES = 4
"""Row-wise Adagrad's sum of a row, as it lies below the device."""
MOST_BAG = 2
"""Times the mean number of ids of bags that a batch's bags are taken to have at most."""
LEFT_FREE = 0.02
"""Share of a device's memory that a cache leaves free, for predictions are not exact."""
FIND_SECONDS = 0.13e-6
"""Seconds in which an id's row is looked for in the cache and counted (docs/benchmarks/table-levels.md)."""
ROW_SECONDS = {"host": 0.35e-6, "ssd": 1e-6}
"""Seconds in which a row is brought in and another one written back, beside their bytes: in host memory as
measured there; an SSD is as fast as long as its pages are in memory, and is taken to be slower because they may
not be."""


class Matrix(NamedTuple):
    """A matrix of tables of one embedding length."""

    rows: int
    least: int
    """The most rows that a batch may read: a cache has no fewer."""
    row_bytes: int
    """Bytes of a row in the cache, with its optimizer's state."""
    stored_bytes: int
    """Bytes of a row below the device."""
    tables: tuple[tuple[int, float], ...]
    """Rows of each table, and the ids that a batch looks up there."""


class Below:
    """The tables of one rank as they lie below its device."""

    def __init__(
        self, groups: Sequence[TableGroup], tables: Sequence[Table], examples: int, weight_bytes: int
    ) -> None:
        """`examples` of the rank's batch; bytes of a weight as it is stored."""
        self._matrices = [_matrix(group, tables, examples, weight_bytes) for group in groups]
        self.least_bytes = sum(matrix.least * matrix.row_bytes for matrix in self._matrices)
        """Bytes of the smallest cache."""
        self.whole_bytes = sum(matrix.rows * matrix.row_bytes for matrix in self._matrices)
        """Bytes of a cache that has all rows."""

    def host_bytes(self, strategy: Strategy) -> int:
        """Returns what a rank takes of the host's memory: tables that lie there, and what is known of each row.
        Pages of a file that are held in memory can be had back, and do not count."""
        in_memory = strategy.tables == "host"
        return sum(m.rows * (INDEX_BYTES + in_memory * m.stored_bytes) for m in self._matrices)

    def cached_rows(self, cache_kib: int) -> tuple[int, ...]:
        """Returns the rows of each matrix that a cache of this size has: those of a batch, and of what is left the
        same share of every matrix."""
        spare, rest = KIB * cache_kib - self.least_bytes, self.whole_bytes - self.least_bytes
        share = min(1.0, max(0.0, spare / rest)) if rest else 1.0
        return tuple(matrix.least + int(share * (matrix.rows - matrix.least)) for matrix in self._matrices)

    def cache_bytes(self, cache_kib: int) -> int:
        """Returns the bytes that a cache of this size really takes."""
        rows = zip(self._matrices, self.cached_rows(cache_kib), strict=True)
        return sum(matrix.row_bytes * count for matrix, count in rows)

    def seconds(self, strategy: Strategy, bandwidth: float) -> float:
        """Returns the seconds of a step in which rows are looked for, brought in and written back, on a link or a
        memory of so many bytes/s."""
        seconds = 0.0
        for matrix, held in zip(self._matrices, self.cached_rows(strategy.table_cache), strict=True):
            ids = sum(count for _, count in matrix.tables)
            missed = ids * (1.0 - hit_rate(matrix.tables, held))
            copied = ROW_SECONDS[strategy.tables] + 2 * matrix.row_bytes / bandwidth
            seconds += ids * FIND_SECONDS + missed * copied
        return seconds


def _matrix(group: TableGroup, tables: Sequence[Table], examples: int, weight_bytes: int) -> Matrix:
    its = [tables[place] for place in group.places]
    read = (examples * table.mean_ids * (MOST_BAG if table.multi_hot else 1) for table in its)
    return Matrix(
        rows=sum(table.rows for table in its),
        least=sum(min(table.rows, math.ceil(most)) for table, most in zip(its, read, strict=True)),
        row_bytes=group.dim * weight_bytes + ONE_PROCESS_ROW_STATE_BYTES,
        stored_bytes=group.dim * weight_bytes + STORED_STATE_BYTES,
        tables=tuple((table.rows, examples * table.mean_ids) for table in its),
    )


def hit_rate(tables: Sequence[tuple[int, float]], cached: int) -> float:
    """Returns the share of lookups whose row is among the most frequent ones of all tables together.

    The k-th row of a table of R rows with n ids occurs n / (k H(R)) times in a batch. Rows above one frequency
    are in the cache: of each table a number in proportion to n / H(R), and all rows of a table that has fewer.

    Args:
        tables: rows of each table, and ids that are looked up there.
        cached: rows in the cache.
    """
    wanted = [(rows, ids, ids / _harmonic(rows)) for rows, ids in tables if ids]
    found, left = 0.0, float(cached)
    while wanted:
        per_weight = left / sum(weight for _, _, weight in wanted)
        whole = [each for each in wanted if per_weight * each[2] >= each[0]]
        if not whole:
            found += sum(weight * _harmonic(per_weight * weight) for _, _, weight in wanted)
            break
        found += sum(ids for _, ids, _ in whole)
        left -= sum(rows for rows, _, _ in whole)
        wanted = [each for each in wanted if each not in whole]
    total = sum(ids for _, ids in tables)
    return found / total if total else 1.0


def _harmonic(n: float) -> float:
    """H(n), by Euler's expansion; below 1, where there is part of a row, that part."""
    return math.log(n) + 0.5772156649 + 0.5 / n - 1 / (12 * n * n) if n >= 1 else n
