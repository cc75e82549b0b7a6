"""Which rows are train, validation and test, so that no later row teaches about an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dhen.errors import UserError, unknown_name
from trials.data.log_schema import SplitRule
from trials.data.raw.stamps import MISSING_STAMP, Stamps

TRAIN, VALIDATION, TEST = range(3)
MAX_CELLS = 1 << 16
"""Number of distinct time stamps that are counted singly; above, neighbours are counted together."""


class StampCounts:
    """The number of rows of each time stamp, in bounded memory.

    Stamps are counted in cells of 2 ** shift milliseconds, as fine as the number of non-empty cells allows;
    a cut between cells never divides rows with equal stamps.
    """

    def __init__(self) -> None:
        self.missing = 0
        self.chronological = True
        """Whether no row was earlier than one before it."""
        self._latest = MISSING_STAMP
        self._shift = 0
        self._cells = np.empty(0, dtype=np.int64)
        self._rows = np.empty(0, dtype=np.int64)

    def add(self, stamps: Stamps) -> None:
        """Counts more rows."""
        present = stamps[stamps != MISSING_STAMP]
        self.missing += len(stamps) - len(present)
        if len(present):
            steps = np.diff(present, prepend=max(self._latest, present.min()))
            self.chronological = self.chronological and bool(np.all(steps >= 0))
            self._latest = int(present[-1])
        self._merge(present >> self._shift, np.ones(len(present), dtype=np.int64))
        while len(self._cells) > MAX_CELLS:
            self._shift += 1
            cells, rows = self._cells >> 1, self._rows
            self._cells, self._rows = cells[:0], rows[:0]
            self._merge(cells, rows)

    def _merge(self, cells: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        cells, position = np.unique(np.concatenate([self._cells, cells]), return_inverse=True)
        weights = np.concatenate([self._rows, rows]).astype(np.float64)  # exact below 2 ** 53
        self._cells, self._rows = cells, np.bincount(position, weights, len(cells)).astype(np.int64)

    def cuts(self, validation: float, test: float) -> tuple[int, int]:
        """Returns the stamps at which validation and test begin: near the fractions wanted, and no split empty.

        Raises:
            UserError: when there are fewer than three distinct stamps.
        """
        if len(self._cells) < 3:
            raise UserError(
                f"a split by time stamp needs three distinct ones, the log has {len(self._cells)}: "
                "use `split: {by: order}` in schema.yaml."
            )
        before = np.cumsum(self._rows) - self._rows  # rows that are earlier than a cell
        rows = self._rows.sum()
        test_cell = 2 + _nearest(before[2:], (1.0 - test) * rows)
        validation_cell = 1 + _nearest(before[1:test_cell], (1.0 - test - validation) * rows)
        return int(self._cells[validation_cell] << self._shift), int(self._cells[test_cell] << self._shift)


def _nearest(values: NDArray[np.int64], target: float) -> int:
    return int(np.argmin(np.abs(values - target)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """A split rule made definite for one log."""

    rule: SplitRule
    starts: tuple[int, int] = (0, 0)
    """Beginnings of validation and test: milliseconds, or positions in the log."""

    def of(self, file: str, first_row: int, rows: int, stamps: Stamps | None) -> NDArray[np.uint8]:
        """Returns the split (0 train, 1 validation, 2 test) of consecutive rows of a file; no stamp means
        train."""
        if self.rule.by == "files":
            split = VALIDATION if file in self.rule.files("validation") else TRAIN
            split = TEST if file in self.rule.files("test") else split
            return np.full(rows, split, dtype=np.uint8)
        if self.rule.by == "order":
            position = np.arange(first_row, first_row + rows)
        else:
            assert stamps is not None
            position = stamps  # a missing one is the lowest number there is
        return (position >= self.starts[0]).astype(np.uint8) + (position >= self.starts[1])


def plan_splits(rule: SplitRule, rows: int, files: Sequence[str], stamps: StampCounts | None) -> SplitPlan:
    """Makes a rule definite.

    Raises:
        UserError: for files the log has not, too few rows, or too few distinct time stamps.
    """
    if rule.by == "files":
        for name in (*rule.files("validation"), *rule.files("test")):
            if name not in files:
                raise UserError(f"split: {unknown_name('file', name, files)}")
        return SplitPlan(rule=rule)
    validation, test = rule.fractions
    if rule.by == "timestamp":
        assert stamps is not None
        return SplitPlan(rule=rule, starts=stamps.cuts(validation, test))
    if rows < 3:
        raise UserError(f"the log has {rows} rows: train, validation and test need one each at least.")
    test_start = min(rows - 1, max(2, round(rows * (1.0 - test))))
    return SplitPlan(
        rule=rule, starts=(min(test_start - 1, max(1, round(rows * (1.0 - test - validation)))), test_start)
    )
