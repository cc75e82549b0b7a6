"""Embedding tables on servers: what the ranks hold of them for a step, what is sent, what servers hold.

A rank pulls each row that its examples look up once, and pushes its gradient; ids that occur several times in its
batch are counted as often as they are looked up, as nothing is known of how they repeat within one, up to the rows
that a table has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dhen.schema import Table
from trials.planner.tables.table_cost import FP32_BYTES

NUMBER_BYTES = 8
"""Bytes of a row's number on its way."""
COPIES = 3
"""Copies of the rows' width on a rank at the end of a step: weights, gradients, and these as they are sent."""


class Served(NamedTuple):
    """The tables of a model on servers, for ranks that look so many examples up in a step."""

    tables: tuple[Table, ...]
    dims: tuple[int, ...]
    examples: int
    """Examples of a rank in a step."""
    weight_bytes: int
    """Bytes of a weight, as servers store it."""
    sent_bytes: int
    """Bytes of a weight or gradient on its way."""

    def _rows(self) -> list[float]:
        return [min(table.rows, table.mean_ids * self.examples) for table in self.tables]

    @property
    def rows_pulled(self) -> float:
        """Number of rows that a rank pulls in a step, at most."""
        return sum(self._rows())

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that a rank has from the lookup to the end of the step."""
        widths = zip(self._rows(), self.dims, strict=True)
        return math.ceil(sum(rows * (FP32_BYTES * dim + NUMBER_BYTES) for rows, dim in widths))

    @property
    def update_bytes(self) -> int:
        """Bytes beside these while gradients are pushed."""
        widths = zip(self._rows(), self.dims, strict=True)
        return math.ceil(sum(rows * FP32_BYTES * dim * (COPIES - 1) for rows, dim in widths))

    @property
    def pulled_bytes(self) -> float:
        """Bytes that a rank gets in a step; it sends as many."""
        return sum(
            rows * (self.sent_bytes * dim + NUMBER_BYTES)
            for rows, dim in zip(self._rows(), self.dims, strict=True)
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of all rows on all servers together, with row-wise Adagrad's sums."""
        sizes: Sequence[tuple[Table, int]] = list(zip(self.tables, self.dims, strict=True))
        return sum(table.rows * (self.weight_bytes * dim + FP32_BYTES) for table, dim in sizes)
