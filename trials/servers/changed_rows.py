"""Which rows of a server, and which keys of theirs, have changed since somebody asked for them last.

A row that is told is forgotten at once, and noted again by its next update: who asks again and again while
training goes on is told each change, and lacks what came after the last time.

Shapes: R rows of the server's part of a matrix, U of them, K of the rows that keys have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ChangedRows:
    """The rows of one server that were not told since they changed."""

    def __init__(self, rows: Mapping[str, int], key_R: Tensor | None) -> None:
        """Takes all rows for changed: of what was before nothing is known.

        Args:
            rows: the number of rows of each matrix.
            key_R: the key of each growing row; None where no table grows.
        """
        self._is_changed = {name: torch.ones(count, dtype=torch.bool) for name, count in rows.items()}
        self._told_key_R = None if key_R is None else ~key_R

    def note(self, name: str, row_U: Tensor) -> None:
        """Notes that rows of a matrix change."""
        self._is_changed[name][row_U] = True

    def note_all(self) -> None:
        """Notes that all rows change, as each step's table decay does."""
        for is_changed_R in self._is_changed.values():
            is_changed_R.fill_(True)

    def all_told(self, key_R: Tensor | None) -> None:
        """Takes all rows and keys, as they are, for told."""
        for is_changed_R in self._is_changed.values():
            is_changed_R.fill_(False)
        self._told_key_R = None if key_R is None else key_R.clone()

    def take(self, name: str, most: int) -> Tensor:
        """Returns the first changed row_U of a matrix, so many at most, which count as told from then on."""
        row_U = self._is_changed[name].nonzero().squeeze(1)[:most]
        self._is_changed[name][row_U] = False
        return row_U

    def take_keys(self, key_R: Tensor, most: int) -> Tensor:
        """Returns the first rows (K) whose key is another than the one told last, so many at most, which count as
        told from then on."""
        assert self._told_key_R is not None
        row_K = (key_R != self._told_key_R).nonzero().squeeze(1)[:most]
        self._told_key_R[row_K] = key_R[row_K]
        return row_K
