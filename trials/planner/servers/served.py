"""Embedding tables on servers: the rows that ranks pull for a step, and the bytes that are held and sent of them.

A rank pulls each row that its examples look up once, however often it occurs, and pushes its gradient. How many
these are follows from how unevenly ids occur (`trials.planner.tables.levels`): counted ones as they were counted,
others by Zipf's law with exponent 1.

Shapes: S stretches of rows that occur about equally often.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dhen.memory.tape import FP32_BYTES
from dhen.schema import Table
from trials.planner.tables.levels import stretches

NUMBER_BYTES = 8
"""Bytes of a row's number."""
SUM_BYTES = 4
"""Bytes of row-wise Adagrad's sum of a row."""


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

    def rows(self, examples: int | None = None) -> list[float]:
        """Returns the rows of each table that so many examples look up, each once; by default a rank's."""
        examples = self.examples if examples is None else examples
        return [different_rows(table, examples) for table in self.tables]

    @property
    def rows_pulled(self) -> float:
        """Rows that a rank pulls in a step."""
        return sum(self.rows())

    @property
    def growing_rows(self) -> float:
        """Rows of growing tables among them, which are asked for by their keys first."""
        named = zip(self.tables, self.rows(), strict=True)
        return sum(rows for table, rows in named if table.growing is not None)

    @property
    def numbers_pulled(self) -> float:
        """Weights in these rows."""
        return sum(rows * dim for rows, dim in zip(self.rows(), self.dims, strict=True))

    @property
    def ids(self) -> float:
        """Ids that a rank looks up in a step, each as often as it occurs."""
        return self.examples * sum(table.mean_ids for table in self.tables)

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that a rank has from the lookup to the end of the step, with their numbers."""
        return math.ceil(FP32_BYTES * self.numbers_pulled + NUMBER_BYTES * self.rows_pulled)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of these rows' gradients."""
        return math.ceil(FP32_BYTES * self.numbers_pulled)

    @property
    def pulled_bytes(self) -> float:
        """Bytes of rows that a rank gets in a step; it has sent their numbers."""
        return self.sent_bytes * self.numbers_pulled

    @property
    def pushed_bytes(self) -> float:
        """Bytes that a rank sends in a step: gradients with the numbers of their rows."""
        return self.sent_bytes * self.numbers_pulled + NUMBER_BYTES * self.rows_pulled

    @property
    def lookup_bytes(self) -> float:
        """Bytes that go through a rank's memory as it looks embeddings up in rows pulled, and sums gradients up
        by row: either is read and written."""
        width = sum(table.mean_ids * dim for table, dim in zip(self.tables, self.dims, strict=True))
        return 2 * 2 * FP32_BYTES * width * self.examples

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows on all servers together, with row-wise Adagrad's sums."""
        sizes = zip(self.tables, self.dims, strict=True)
        return sum(table.rows * (self.weight_bytes * dim + SUM_BYTES) for table, dim in sizes)


def different_rows(table: Table, examples: int) -> float:
    """Returns how many different rows of a table so many examples look up, as is to be expected."""
    row_S, mean_S = stretches(table)
    ids_S = examples * mean_S
    found = float((row_S * -np.expm1(-ids_S / row_S)).sum())
    first = max(
        0.0, examples * table.mean_ids - float(ids_S.sum())
    )  # first lookups, each of a row of its own
    return min(table.rows, found + first)
