"""Which rows are train, validation and test, so that no later row teaches about an earlier one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dhen.errors import UserError, unknown_name
from trials.data.encoding.hashing import mixed
from trials.data.log_schema import SplitRule
from trials.data.raw.stamps import MISSING_STAMP, Stamps
from trials.data.raw.text import spelled

TRAIN, VALIDATION, TEST = range(3)
OPEN = 3
"""The mark of a row that no list names, where a fraction decides about such rows."""
LAST = int(np.iinfo(np.int64).max)
"""A position that no row has."""
DRAW_BITS = 31
"""Bits of the numbers that rows draw in a random split."""
SEED = np.uint64(0x5D588B656C078965)
"""Seed of these, the same in every log."""
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

    def add(self, stamps: Stamps, counted: NDArray[np.bool_] | None = None) -> None:
        """Counts more rows, all or those that are marked; whether they are in order is asked of all."""
        present = stamps[stamps != MISSING_STAMP]
        if len(present):
            steps = np.diff(present, prepend=max(self._latest, present.min()))
            self.chronological = self.chronological and bool(np.all(steps >= 0))
            self._latest = int(present[-1])
        if counted is not None:
            stamps = stamps[counted]
            present = stamps[stamps != MISSING_STAMP]
        self.missing += len(stamps) - len(present)
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

        A fraction of 0 is of a split that lists name: nothing is cut for it.

        Raises:
            UserError: when there are fewer distinct stamps than splits to be cut.
        """
        parts = 1 + bool(validation) + bool(test)
        if len(self._cells) < parts:
            raise UserError(
                f"a split by time stamp needs {'three' if parts == 3 else 'two'} distinct ones, "
                f"{'the log has' if parts == 3 else 'the rows that are not given have'} {len(self._cells)}: "
                "use `by: order` under `split` in schema.yaml."
            )
        before = np.cumsum(self._rows) - self._rows  # rows that are earlier than a cell
        rows = self._rows.sum()
        if parts == 2:
            cell = 1 + _nearest(before[1:], (1.0 - validation - test) * rows)
            cut = int(self._cells[cell] << self._shift)
            return cut, cut if test else LAST
        test_cell = 2 + _nearest(before[2:], (1.0 - test) * rows)
        validation_cell = 1 + _nearest(before[1:test_cell], (1.0 - test - validation) * rows)
        return int(self._cells[validation_cell] << self._shift), int(self._cells[test_cell] << self._shift)


def _nearest(values: NDArray[np.int64], target: float) -> int:
    return int(np.argmin(np.abs(values - target)))


def named_splits(
    rule: SplitRule, file: str, rows: int, values: pa.DictionaryArray | None
) -> NDArray[np.uint8]:
    """Returns the split of consecutive rows of a file as the rule's lists say; others are train, or `OPEN`.

    `values`: of the column whose values the rule lists; None where it lists files, or nothing.
    """
    rest = TRAIN if rule.by in ("files", "column") else OPEN
    listed = dict.fromkeys(rule.names("validation"), VALIDATION) | dict.fromkeys(rule.names("test"), TEST)
    if values is None:
        return np.full(rows, listed.get(file, rest), dtype=np.uint8)
    listed = dict(zip(_spelled(listed), listed.values(), strict=True))
    by_code = [listed.get(value, rest) for value in values.dictionary.to_pylist()]
    codes = values.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    by_code.append(rest)  # of a missing value, whose code is -1
    splits: NDArray[np.uint8] = np.array(by_code, dtype=np.uint8)[codes]
    return splits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """A split rule made definite for one log."""

    rule: SplitRule
    starts: tuple[int, int] = (0, 0)
    """Beginnings of validation and test among open rows: milliseconds, positions among them, or draws."""
    first_of_file: Mapping[str, int] = field(default_factory=dict)
    """Number of open rows before each file's, by its name, for a random split."""

    def of(
        self, file: str, first_open: int, rows: int, stamps: Stamps | None, values: pa.DictionaryArray | None
    ) -> NDArray[np.uint8]:
        """Returns the split (0 train, 1 validation, 2 test) of consecutive rows of a file; no stamp means train.

        `first_open`: how many open rows there are before these.
        """
        splits = named_splits(self.rule, file, rows, values)
        is_open = splits == OPEN
        if self.rule.by == "timestamp":
            assert stamps is not None
            position = stamps[is_open]  # a missing one is the lowest number there is
        elif self.rule.by == "random":
            position = self.draws(file, first_open, int(is_open.sum()))
        else:
            position = np.arange(first_open, first_open + is_open.sum())
        splits[is_open] = (position >= self.starts[0]).astype(np.uint8) + (position >= self.starts[1])
        return splits

    def draws(self, file: str, first_open: int, rows: int) -> NDArray[np.int64]:
        """Returns what consecutive open rows draw (N): a hash of the file's place in the log and the row's number
        in it, so that neither names nor batches change anything."""
        place = np.array([list(self.first_of_file).index(file)], dtype=np.uint64)
        start = first_open - self.first_of_file[file]
        number = np.arange(start, start + rows).astype(np.uint64)
        return (mixed(mixed(place ^ SEED) + number) >> np.uint64(64 - DRAW_BITS)).astype(np.int64)


def plan_splits(
    rule: SplitRule,
    open_rows: int,
    stamps: StampCounts | None,
    first_of_file: Mapping[str, int] | None = None,
) -> SplitPlan:
    """Makes a rule definite; `open_rows` are rows that no list names, and `stamps` theirs.

    `first_of_file`: how many of them come before each file's, by its name, in the order of the log.

    Raises:
        UserError: for too few rows, or too few distinct time stamps.
    """
    if rule.by in ("files", "column"):
        return SplitPlan(rule=rule)
    validation, test = rule.fractions
    if validation and test:
        if open_rows < 3 and rule.by != "timestamp":
            raise UserError(
                f"the log has {open_rows} rows: train, validation and test need one each at least."
            )
    elif open_rows < 2:
        listed, cut = ("validation", "test") if test else ("test", "validation")
        raise UserError(
            f"split: {listed} takes all rows{' but one' if open_rows else ''}: training and {cut} need one each "
            f"at least. List fewer for {listed}, or give it a fraction too."
        )
    if rule.by == "timestamp":
        assert stamps is not None
        return SplitPlan(rule=rule, starts=stamps.cuts(validation, test))
    if rule.by == "random":
        # cut where so many draws lie, not at shares of their range: a part of a small log is never empty
        plan, drawn = SplitPlan(rule=rule, first_of_file=first_of_file or {}), StampCounts()
        begins = [*plan.first_of_file.values(), open_rows]
        for file, first, end in zip(plan.first_of_file, begins, begins[1:], strict=False):
            for start in range(first, end, MAX_CELLS):
                drawn.add(plan.draws(file, start, min(MAX_CELLS, end - start)))
        return replace(plan, starts=drawn.cuts(validation, test))
    if not test:
        return SplitPlan(rule=rule, starts=(_start(1, open_rows, validation), LAST))
    test_start = _start(2 if validation else 1, open_rows, test)
    before = min(test_start - 1, max(1, round(open_rows * (1.0 - test - validation))))
    return SplitPlan(rule=rule, starts=(before if validation else test_start, test_start))


def _start(earliest: int, rows: int, fraction: float) -> int:
    """Returns where the last split of so many rows begins: no split is empty."""
    return min(rows - 1, max(earliest, round(rows * (1.0 - fraction))))


def check_names(rule: SplitRule, files: Sequence[str], column: str | None, values: Collection[str]) -> None:
    """Checks that the log has what the rule lists.

    Raises:
        UserError: for a file, or a value of `column`, that the log has not, or a name of several files.
    """
    listed = (*rule.names("validation"), *rule.names("test"))
    for name, value in zip(listed, _spelled(listed), strict=True):
        if column is None and name not in files:
            raise UserError(f"split: {unknown_name('file', name, set(files))}")
        if column is None and files.count(name) > 1:
            raise UserError(
                f"split: {files.count(name)} files of the log are called {name!r}; give the one that is meant a "
                "name of its own."
            )
        if column is not None and value not in values:
            unknown = unknown_name(f"value of column {column!r}", name, values)
            raise UserError(f"split: {unknown} (Files are meant where no column has the role split.)")


def _spelled(names: Collection[str]) -> list[str]:
    """Returns values that a rule lists as they are spelled in a column that was read."""
    return [str(name) for name in spelled(pa.array(list(names), pa.string())).to_pylist()]
