"""What the order of a log's rows shows, seen batch by batch: by which of its columns it is sorted, and whether it
begins with one class. Parts that are cut from such a log by order would be of different kinds.

A column is sorted by chance with the probability 2 / (the number of orders of its values), which a column of few
values, or few rows, can have: it says something only below `CHANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trials.data.log_schema import LogSchema
from trials.data.raw.text import numbers_of
from trials.data.roles import names

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
        self._head_rows, self._head_clicks = (
            self._head_rows + len(head_N),
            self._head_clicks + int(head_N.sum()),
        )
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
