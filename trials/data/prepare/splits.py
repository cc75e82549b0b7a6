"""Which rows are train, validation and test, so that no later row teaches about an earlier one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dhen.errors import UserError, unknown_name
from trials.data.log_schema import LogSchema, SplitRule
from trials.data.raw.columns import MISSING_STAMP, Stamps, codes_of, numbers_of, spelled
from trials.data.roles import names
from trials.data.vocabulary import mixed

TRAIN, VALIDATION, TEST = range(3)
OPEN = 3
"""The mark of a row that no list names, if a fraction decides about such rows."""
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

    `values`: of the column whose values the rule lists; None if it lists files, or nothing.
    """
    rest = TRAIN if rule.by in ("files", "column") else OPEN
    listed = dict.fromkeys(rule.names("validation"), VALIDATION) | dict.fromkeys(rule.names("test"), TEST)
    if values is None:
        return np.full(rows, listed.get(file, rest), dtype=np.uint8)
    listed = dict(zip(_spelled(listed), listed.values(), strict=True))
    by_code = [listed.get(value, rest) for value in values.dictionary.to_pylist()]
    by_code.append(rest)  # of a missing value, whose code is -1
    splits: NDArray[np.uint8] = np.array(by_code, dtype=np.uint8)[codes_of(values)]
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
            raise UserError(f"split: {unknown} (Files are meant if no column has the role split.)")


def _spelled(names: Collection[str]) -> list[str]:
    """Returns values that a rule lists as they are spelled in a column that was read."""
    return [str(name) for name in spelled(pa.array(list(names), pa.string())).to_pylist()]


# What the order of a log's rows shows, seen batch by batch: by which of its columns it is sorted, and whether it
# begins with one class. Parts that are cut from such a log by order would be of different kinds.
#
# A column is sorted by chance with the probability 2 / (the number of orders of its values), which a column of
# few values, or few rows, can have: it says something only below `CHANCE`.

HEAD_ROWS = 100_000
"""Number of first rows which, if they are of one class, have a log split at random."""
CHANCE = 1e-6
COUNTER = 0.98
"""Share of rows from which on whole numbers that rise at so many rows count them."""
_PERIODS = frozenset(("year", "quarter", "month", "week", "minute"))


class _Sorted:
    """A column that has been sorted so far."""

    def __init__(self) -> None:
        self.rises: bool | None = None
        self.rows, self.steps = 0, 0
        self._run = 0
        self._last: float | str = 0.0
        self._log_equal = 0.0
        """Logarithm of the number of orders that equal values could have without notice, but for the last run."""

    def goes_on(self, rank_N: NDArray[np.generic], first: float | str, last: float | str) -> bool:
        """Takes in more values by their ranks, first and last themselves; tells whether they are sorted too."""
        before = (first > self._last) - (first < self._last) if self.rows else 0  # type: ignore[operator]
        step_N = np.concatenate([[before], np.sign(np.diff(rank_N.astype(np.float64)))])
        at = np.flatnonzero(step_N)
        directions = {bool(step > 0) for step in np.unique(step_N[at])} | ({self.rises} - {None})
        if len(directions) > 1:
            return False
        self.rises = next(iter(directions), None)
        runs = np.diff(at, prepend=-self._run)
        for run, count in zip(*np.unique(runs, return_counts=True), strict=True):
            self._log_equal += int(count) * math.lgamma(run + 1)
        self._run = len(rank_N) - int(at[-1]) if len(at) else self._run + len(rank_N)
        self.rows, self.steps, self._last = self.rows + len(rank_N), self.steps + len(at), last
        return True

    @property
    def tells(self) -> bool:
        """Whether it is not so by chance."""
        log_orders = math.lgamma(self.rows + 1) - self._log_equal - math.lgamma(self._run + 1)
        return math.log(2) - log_orders < math.log(CHANCE)


class RowOrder:
    """The columns by which a log is sorted, and the classes of its first rows."""

    def __init__(self, schema: LogSchema) -> None:
        self._label = schema.label
        columns = [*schema.categorical, *schema.numeric, *filter(None, (schema.label, schema.weight))]
        self._columns = {(name, text): _Sorted() for name in columns for text in (False, True)}
        self._whole = dict.fromkeys(schema.numeric, True)
        self._head_rows, self._head_clicks = 0, 0

    def add(self, columns: Mapping[str, pa.Array], label_N: NDArray[np.uint8]) -> None:
        """Takes in more columns, typed or raw numbers, and their rows' labels, which may be more."""
        head_N = label_N[: HEAD_ROWS - self._head_rows]
        self._head_rows += len(head_N)
        self._head_clicks += int(head_N.sum())
        for (name, text), column in list(self._columns.items()):
            ranked = _ranked(columns[name], text=text)
            if ranked is None or (len(ranked[0]) and not column.goes_on(*ranked)):
                del self._columns[name, text]
            elif ranked[0].dtype.kind == "f":
                self._whole[name] = self._whole.get(name, True) and not np.any(ranked[0] % 1)

    def rule(self) -> tuple[Literal["order", "random"], str | None]:
        """Returns how a log without time stamps is split, and why; None: nothing speaks against its order."""
        if self._head_rows == HEAD_ROWS and self._head_clicks in (0, HEAD_ROWS):
            return "random", f"its first {HEAD_ROWS:,} rows are of one class"
        found = {name: column for (name, _), column in self._columns.items() if column.steps}
        if self._label in found:
            return "random", f"it is sorted by its label {self._label!r}"
        telling = {name: column for name, column in found.items() if column.tells}
        for name, column in telling.items():
            if column.rises and (names.suggests_time(name) or names.words_of(name) & _PERIODS):
                return "order", f"{name!r} rises along it"
        for name, column in telling.items():
            counts_rows = column.rises and self._whole.get(name) and column.steps > COUNTER * column.rows
            if not counts_rows:
                return "random", f"it is sorted by {name!r}"
        return "order", None


def _ranked(column: pa.Array, *, text: bool) -> tuple[NDArray[np.generic], float | str, float | str] | None:
    """Returns ranks of the values that are not missing (N), the first value and the last, as text or as numbers;
    None for a column that has none of these."""
    if not pa.types.is_dictionary(column.type):
        if text:
            return None
        values = column.to_numpy()
        values = values[~np.isnan(values)].astype(np.float64)
        return values, *((float(values[0]), float(values[-1])) if len(values) else (0.0, 0.0))
    codes = column.indices.drop_null().to_numpy()
    if not text:
        numbers, unreadable = numbers_of(column.dictionary)
        if unreadable.any() or np.isnan(numbers).any():
            return None
        return _ranked(pa.array(numbers[codes]), text=False)
    rank = np.argsort(pc.sort_indices(column.dictionary).to_numpy())
    ends = [str(column.dictionary[int(codes[at])]) if len(codes) else "" for at in (0, -1)]
    return rank[codes], ends[0], ends[1]
