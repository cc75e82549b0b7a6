"""The periods of a log in the order of time: calendar ones of its time stamps, or so many rows each.

The rows are those of some of a prepared log's splits, one after another.

Shapes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dhen.errors import UserError
from trials.data.encoding import EncodedRows
from trials.data.log_schema import SPLITS
from trials.data.prepared_log import PreparedLog, Split
from trials.data.raw.columns import MISSING_STAMP
from trials.data.read_options import parse_length
from trials.records.metrics import ClickTotals

AFTER_TRAINING = ("validation", "test")
"""Splits that come after the training rows, in the order of time."""


class Period(NamedTuple):
    """One period with its rows."""

    number: int
    first: int | None
    """Time stamp of its first row, milliseconds since 1970; None if the log has none."""
    last: int | None
    """Time stamp of its last row."""
    rows: Split
    ne_floor: float | None
    """Lowest NE that any model can reach, if the log is generated and says so."""


@dataclass(frozen=True, slots=True)
class Periods:
    """The rows of a log, cut into periods."""

    log: PreparedLog
    length: str
    """The length of each, in the words that `parse_length` reads."""
    parts: tuple[Split, ...]
    stamps: NDArray[np.int64] | None
    """Time stamps (N) in order of time."""
    rows: NDArray[np.int64]
    """Numbers of the rows (N) in that order, counted over all splits, one after another."""
    starts: tuple[int, ...]
    """The place among them where each period begins, and at the end their number."""

    @classmethod
    def of(
        cls, log: PreparedLog, text: str, splits: Sequence[str] = SPLITS, *, unstamped: bool = False
    ) -> Periods:
        """Cuts the rows of some splits of a log; rows without a time stamp are left out, or, if `unstamped`,
        are a period before all others.

        Raises:
            UserError: as `parse_length`; for a time if the log has no time stamps, or no row with one.
        """
        milliseconds, row_count = parse_length(text)
        parts = tuple(log.split(name) for name in splits)
        stamped = [part.timestamp for part in parts if part.timestamp is not None]
        if not stamped:
            if not row_count:
                raise UserError(
                    "the log has no time stamps to cut periods by: give a number of rows, such as period=50000."
                )
            stamps, rows = None, np.arange(sum(part.rows for part in parts))
        else:
            stamps = np.concatenate(stamped)
            rows = np.argsort(stamps, kind="stable")
            first = int(np.searchsorted(stamps[rows], MISSING_STAMP, side="right"))
            if first == len(rows):
                raise UserError("no row of the log has a time stamp.")
            rows = rows if unstamped else rows[first:]
            stamps = stamps[rows]
        if row_count or stamps is None:
            starts = list(range(0, len(rows), row_count))
        else:
            cells = stamps // milliseconds
            starts = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist()]
        return cls(log, text, parts, stamps, rows, (*starts, len(rows)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def begins_at(self) -> int | None:
        """Time stamp of the earliest row, milliseconds since 1970; None if the log has none."""
        return None if self.stamps is None else int(self.stamps[0])

    @property
    def left_out(self) -> int:
        """Number of rows without a time stamp."""
        return sum(part.rows for part in self.parts) - len(self.rows)

    def __getitem__(self, number: int) -> Period:
        """Returns a period, its rows copied into memory."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        span = slice(self.starts[number], self.starts[number + 1])
        # its rows, counted over all parts, as a split of their own
        parts, row_N = self.parts, self.rows[span]
        ends = np.cumsum([part.rows for part in parts])
        of_N = np.searchsorted(ends, row_N, side="right")
        some = [
            (part, row_N[of_N == place] - (end - part.rows))
            for place, (part, end) in enumerate(zip(parts, ends, strict=True))
            if (of_N == place).any()
        ]
        back_N = np.argsort(np.argsort(of_N, kind="stable"), kind="stable")

        def joined(name: str) -> Any:
            if getattr(parts[0], name) is None:
                return None
            return np.concatenate([getattr(part, name)[rows] for part, rows in some])[back_N]

        inputs = EncodedRows.joined([part.inputs.take(rows) for part, rows in some])
        split = Split(
            name=f"period {number}",
            labels=joined("labels"),
            inputs=inputs if len(some) == 1 else inputs.take(back_N),
            weight=joined("weight"),
            oracle=joined("oracle"),
            timestamp=joined("timestamp"),
            base_rate=parts[0].base_rate,
            chronological=True,
        )
        floor = None
        if split.oracle is not None:
            clicks = ClickTotals(self.log.schema.negative_sampling_rate)
            clicks.add(split.labels, split.weight, split.oracle)
            floor = clicks.ne_floor if math.isfinite(clicks.ne_floor) else None
        first, last = (
            (None, None) if self.stamps is None else self.stamps[[span.start, span.stop - 1]].tolist()
        )
        return Period(number, first, last, split, floor)


def check_periods(log: PreparedLog, length: str, ranks: int) -> None:
    """Checks that validation and test of a log come after its training rows, in periods that have a row at least
    for each of so many ranks.

    Raises:
        UserError: if they do not.
    """
    stamps: list[NDArray[np.int64]] = []  # of the rows that have one
    for name in SPLITS:
        stamp_N = log.split(name).timestamp
        stamps.append(np.empty(0, np.int64) if stamp_N is None else stamp_N[stamp_N != MISSING_STAMP])
    for earlier, later, before, after in zip(stamps, stamps[1:], SPLITS, SPLITS[1:], strict=False):
        if len(earlier) and len(later) and later.min() < earlier.max():
            raise UserError(
                f"objective=next_period goes through the log in the order of time, and {after} begins before "
                f"{before} ends: give split.by=timestamp, or leave the objective out."
            )
    if not any(map(len, stamps)) and log.schema.split.by in ("column", "random"):
        raise UserError(
            "objective=next_period goes through the log in its order, and this one is split by "
            f"{log.schema.split.by} and has no time stamps: give split.by=order, or leave the objective out."
        )
    # validation is gone through by itself too, and ends with the end of a period
    parts = (AFTER_TRAINING[:1], AFTER_TRAINING)
    cut = [Periods.of(log, length, names, unstamped=True) for names in parts]
    least = min(int(np.diff(periods.starts).min()) for periods in cut)
    if least < ranks:
        raise UserError(
            f"period={length}: the smallest period has {least} rows, fewer than one for each of {ranks} ranks; "
            "give a longer period, or fewer ranks."
        )
