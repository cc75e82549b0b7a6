"""Tables below the device, in host memory or on an SSD: the cache of their rows, and what it costs.

A cache has at least the rows of one batch, and otherwise what is left of the device's memory; each matrix of
tables has its share. How often a row is found there depends on how unevenly ids occur: where a log's ids were
counted, its tables tell (`Table.repeats`); elsewhere ids are taken to follow Zipf's law with exponent 1 over the
rows of their table, as ids of click logs about do, and to have been seen before.

Shapes: S stretches of rows that occur about equally often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dhen.inputs.table_dims import TableGroup
from dhen.schema import Table, kept_rows
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
not be. A row that has to be read from a cold file took 33e-6 to 105e-6 (docs/benchmarks/table-levels.md): how many
have to be is not known to a plan."""


class Hits(NamedTuple):
    """How often a cache that has the most frequent rows of some tables has the row of an id; straight lines
    between the sizes that are given."""

    row_S: NDArray[np.float64]
    """Sizes of caches in rows, ascending."""
    share_S: NDArray[np.float64]
    """The share of all ids whose row is there."""

    def share(self, cached: int) -> float:
        """Returns the share of ids whose row is in a cache of so many rows."""
        return float(np.interp(cached, self.row_S, self.share_S))


class Matrix(NamedTuple):
    """A matrix of tables of one embedding length."""

    rows: int
    least: int
    """The most rows that a batch may read: a cache has no fewer."""
    row_bytes: int
    """Bytes of a row in the cache, with its optimizer's state."""
    stored_bytes: int
    """Bytes of a row below the device."""
    ids: float
    """Number of ids that a batch looks up."""
    hits: Hits
    """How often a cache has the row of an id."""


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
            missed = matrix.ids * (1.0 - matrix.hits.share(held))
            copied = ROW_SECONDS[strategy.tables] + 2 * matrix.row_bytes / bandwidth
            seconds += matrix.ids * FIND_SECONDS + missed * copied
        return seconds

    def hit_rate(self, cache_kib: int) -> float:
        """Returns the share of all ids whose row is in a cache of this size."""
        rows = zip(self._matrices, self.cached_rows(cache_kib), strict=True)
        found = sum(matrix.ids * matrix.hits.share(held) for matrix, held in rows)
        return found / max(sum(matrix.ids for matrix in self._matrices), 1e-9)


def _matrix(group: TableGroup, tables: Sequence[Table], examples: int, weight_bytes: int) -> Matrix:
    its = tuple(tables[place] for place in group.places)
    read = (examples * table.mean_ids * (MOST_BAG if table.multi_hot else 1) for table in its)
    return Matrix(
        rows=sum(table.rows for table in its),
        least=sum(min(table.rows, math.ceil(most)) for table, most in zip(its, read, strict=True)),
        row_bytes=group.dim * weight_bytes + ONE_PROCESS_ROW_STATE_BYTES,
        stored_bytes=group.dim * weight_bytes + STORED_STATE_BYTES,
        ids=examples * sum(table.mean_ids for table in its),
        hits=hits_of(its),
    )


@lru_cache(maxsize=64)
def hits_of(tables: tuple[Table, ...]) -> Hits:
    """Returns how often a cache of the rows that occur most, of all these tables together, has the row of an id.

    Rows of a table between two numbers that are known are taken to occur equally often. Then the stretches of all
    tables come into the cache in the order of how often their rows occur.
    """
    of_tables = [stretches(table) for table in tables]
    rows, found = (np.concatenate(parts) for parts in zip(*of_tables, strict=True))
    order = np.argsort(-found / rows, kind="stable")
    share_S = np.append(0.0, np.cumsum(found[order])) / max(sum(table.mean_ids for table in tables), 1e-9)
    return Hits(np.append(0.0, np.cumsum(rows[order])), share_S)


def stretches(table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the number of rows in each stretch (S), and how many ids of an example it has (S)."""
    rows = np.array(kept_rows(table.rows), dtype=np.float64)
    shares = np.array(table.repeats or [_harmonic(each) / _harmonic(table.rows) for each in rows])
    return np.diff(rows, prepend=0.0), table.mean_ids * np.diff(shares, prepend=0.0)


def _harmonic(n: float) -> float:
    """H(n) of a whole number above 0, by Euler's expansion."""
    return math.log(n) + 0.5772156649 + 0.5 / n - 1 / (12 * n * n)
