"""What a model's tables became since an earlier state, from the rows that servers say have changed.

Servers give rows of growing tables to keys as they see fit, and each as it is numbered among those of all. Here a
key keeps the row that it has in the earlier state, and new keys get free rows, the first ones first, so that the
state differs by what was trained alone.

Shapes: R growing rows, K keys that have one, N rows that changed, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dhen.inputs.features import EmbeddingTables
from dhen.inputs.growing import GrowingRows
from dhen.inputs.key_index import EMPTY, KeyIndex
from trials.servers.client import Servers
from trials.storage.weight_changes import KEYS, changes, row_changes
from trials.storage.weights_file import Weights


class _Place(NamedTuple):
    """Where the rows of a growing table lie."""

    in_matrix: int
    """Row of the matrix that is the table's default row."""
    in_all: int
    """Number of growing rows before the table's."""
    rows: int
    """Number of its rows but for that one."""


class ChangedWeights:
    """The tables' changes, asked from servers again and again."""

    def __init__(
        self, servers: Servers, tables: Mapping[str, EmbeddingTables], growing: GrowingRows | None
    ) -> None:
        """Notes where growing tables lie.

        Args:
            servers: the servers, which number matrices in this order.
            tables: the tables of each matrix, by its name.
            growing: what is known of growing ones; None where there are none.
        """
        self._servers, self._growing = servers, growing
        self._places = {name: list[_Place]() for name in tables}
        self._key_R: Tensor | None = None
        """The key of each growing row on the servers, as they told last."""
        of_tables = {}
        if growing is not None:
            starts = zip(growing.tables, growing.starts, strict=False)
            of_tables = {table.name: (start, table.rows - 1) for table, start in starts}
        for name, matrix in tables.items():
            for table, in_matrix in zip(matrix.tables, matrix.starts, strict=False):
                if table.name in of_tables:
                    self._places[name].append(_Place(in_matrix, *of_tables[table.name]))

    def since(self, before: Mapping[str, Tensor], prefix: str) -> Weights:
        """Returns what tables and keys became, as `trials.storage.weight_changes` has it; all updates must have
        been applied.

        Args:
            before: a state of the model, which has all changes that were returned earlier.
            prefix: the beginning of the names of matrices in it.
        """
        found, row_R = Weights(), None
        if self._growing is not None:
            key_R = self._keys()
            new_R = self._placed_keys(before[KEYS], key_R)
            index = KeyIndex()
            taken_K = new_R.nonzero().squeeze(1)
            index.add(new_R[taken_K], taken_K)
            row_R = index.find(key_R)
            found |= changes({KEYS: before[KEYS]}, {KEYS: new_R})
        for number, (name, places) in enumerate(self._places.items()):
            row_N, weight_ND = self._servers.changed(number)
            if row_R is not None:
                row_N, weight_ND = _placed(row_N, weight_ND, places, row_R)
            found |= row_changes(f"{prefix}{name}", before[f"{prefix}{name}"], row_N, weight_ND)
        return found

    def _keys(self) -> Tensor:
        """Returns the key of each growing row, as the servers number them."""
        assert self._growing is not None
        number = len(self._places)
        if self._key_R is None:
            self._key_R = self._servers.keys(number, len(self._growing.keys))
        row_N, key_N = self._servers.changed(number)
        self._key_R[row_N] = key_N
        return self._key_R

    def _placed_keys(self, before_R: Tensor, key_R: Tensor) -> Tensor:
        """Returns the keys of the servers in rows of the earlier state."""
        assert self._growing is not None
        new_R = torch.where(torch.isin(before_R, key_R), before_R, EMPTY)
        for span in self._growing.spans:
            key_N = key_R[span]
            key_N = key_N[(key_N != EMPTY) & ~torch.isin(key_N, before_R)]
            free = (new_R[span] == EMPTY).nonzero().squeeze(1)[: len(key_N)]
            new_R[span.start + free] = key_N
        return new_R


def _placed(row_N: Tensor, weight_ND: Tensor, places: list[_Place], row_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns changed rows of a matrix as the earlier state numbers them, in order, without free ones; `row_R` is
    where it has each growing row of the servers, 0 for free ones."""
    to_N, is_held_N = row_N.clone(), torch.ones_like(row_N, dtype=torch.bool)
    for in_matrix, in_all, rows in places:
        its = ((row_N > in_matrix) & (row_N <= in_matrix + rows)).nonzero().squeeze(1)
        there = row_R[row_N[its] - in_matrix + in_all]
        to_N[its], is_held_N[its] = there - in_all + in_matrix, there != 0
    to_N, order_N = to_N[is_held_N].sort()
    return to_N, weight_ND[is_held_N][order_N]
