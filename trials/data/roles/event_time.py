"""Chooses the time of the event among time stamps. The others become days before the event, or are left out.

The event's time is the stamp that rises along the file, as logs are written; else the one that is named like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from trials.data.log_schema import IgnoredColumn, NumericColumn, TimestampColumn
from trials.data.raw.stamps import (
    DAY_MS,
    HOUR_MS,
    MISSING_STAMP,
    Stamps,
    clocks_of,
    month_numbers,
    stamps_of_parts,
)
from trials.data.roles import names
from trials.data.roles.rules import JudgedColumn, transform_of
from trials.data.roles.sample import ColumnSample, Sample
from trials.data.roles.stamp_formats import rises, stamps_in

LATER = 0.001
"""Share of a stamp's values that may be later than the event, by clocks that differ."""
_UNITS_MS = (DAY_MS, HOUR_MS, 60_000, 1_000)
_DAY_WORDS = frozenset({"day", "date", "dom", "of", "dayof", "month", "mday"})


def settle_time(judged: dict[str, JudgedColumn], sample: Sample) -> Iterator[str]:
    """Leaves one time stamp among the judged columns, the event's, and yields what was decided.

    Args:
        judged: all columns of the log; changed in place.
        sample: the log's first rows.
    """
    stamps: dict[str, Stamps] = {}
    for name, judgement in judged.items():
        if isinstance(judgement.column, TimestampColumn):
            stamps[name] = stamps_in(sample.columns[name], judgement.column)
    if not stamps:
        yield from _join_date(judged, sample)
        return
    event, reason, sentence = _event(judged, stamps)
    yield from [sentence] if sentence else []
    if sample.complete and len(np.unique(stamps[event][stamps[event] != MISSING_STAMP])) < 3:
        why = "fewer than three time stamps cannot split the log"
        judged[event] = JudgedColumn(IgnoredColumn(), why, f"not used: {event!r} ({why})")
        return
    judged[event] = JudgedColumn(judged[event].column, f"the time of the event: {reason}")
    _add_clock(judged, sample, event, stamps[event])
    for name in stamps.keys() - {event}:
        judged[name] = _beside(name, judged[name].column, stamps[name], event, stamps[event])


def _event(judged: dict[str, JudgedColumn], stamps: dict[str, Stamps]) -> tuple[str, str, str | None]:
    """Returns the event's time stamp, the reason for it, and a sentence if another choice is as plausible."""
    if len(stamps) == 1:
        return next(iter(stamps)), "the only time stamp", None
    for name in stamps:
        if judged[name].given:
            return name, "as you said", None
    distinct = {name: len(np.unique(each)) for name, each in stamps.items()}
    by_name = max(stamps, key=lambda name: (names.suggests_event(name), distinct[name]))
    rising = [name for name, each in stamps.items() if rises(each)]
    event = max(rising or stamps, key=lambda name: (names.suggests_event(name), distinct[name]))
    key = f"`columns.NAME=timestamp` chooses another of {', '.join(map(repr, stamps))}"
    if rising and event != by_name and names.suggests_event(by_name) > 0:
        why = "it is in the file's order"
        sentence = (
            f"the time of the event is {event!r}, as {why}, not {by_name!r}, as its name suggests; {key}"
        )
        return event, why, sentence
    if rising or names.suggests_event(event) > 0:
        why = "in the file's order" if rising else "named like it"
        return event, why, f"the time of the event is {event!r}, {why}; {key}"
    why = "of the time stamps it has most values"
    return event, why, f"the time of the event may be {event!r}: {why}; {key}"


def _beside(name: str, column: object, stamps: Stamps, event: str, moments: Stamps) -> JudgedColumn:
    """Returns what a stamp is for beside the event's: an age, or nothing if it is known only afterwards."""
    assert isinstance(column, TimestampColumn)
    known = (stamps != MISSING_STAMP) & (moments != MISSING_STAMP)
    unit = next((unit for unit in _UNITS_MS if not np.any(moments[known] % unit)), 1)
    later = float(np.mean(stamps[known] // unit * unit > moments[known])) if known.any() else 1.0
    if later > LATER:
        why = f"later than the event in {later:.1%} of the rows that have it, so known only afterwards"
        return JudgedColumn(IgnoredColumn(), why, f"not used: {name!r} ({why})")
    days = (moments[known] - stamps[known]) / DAY_MS
    transform = transform_of(*np.unique(np.round(days, 3), return_counts=True))
    age = NumericColumn(days_before=column.format, missing=column.missing, transform=transform)
    return JudgedColumn(age, f"days before {event!r}")


def _add_clock(judged: dict[str, JudgedColumn], sample: Sample, event: str, moments: Stamps) -> None:
    """Adds the time of day to an event's date, if another column has it."""
    if np.any(moments[moments != MISSING_STAMP] % DAY_MS):
        return
    for name, judgement in judged.items():
        column = sample.columns[name]
        if (
            judgement.given
            or not names.suggests_time(name)
            or not column.distinct
            or column.numbers is not None
        ):
            continue
        if not pa.types.is_nested(column.kind) and not clocks_of(column.values)[1].any():
            date = judged[event]
            judged[event] = replace(date, column=date.column.replace(time=name))
            judged[name] = JudgedColumn(IgnoredColumn(), f"the time of day of {event!r}", sentence="")
            return


def _join_date(judged: dict[str, JudgedColumn], sample: Sample) -> Iterator[str]:
    """Finds a date in three columns and makes the year the time stamp; month and day stay what they are."""
    years, months, days = (
        [name for name in sample.columns if _holds(part, sample.columns[name])]
        for part in ("year", "month", "day")
    )
    for year in years:
        stem = names.words_of(year) - {"year", "date"}
        month = next((name for name in months if names.words_of(name) - {"month", "date"} == stem), None)
        day = next((name for name in days if names.words_of(name) - _DAY_WORDS == stem), None)
        if month is None or day is None or any(judged[name].given for name in (year, month, day)):
            continue
        parts = (sample.columns[year], sample.columns[month], sample.columns[day])
        stamps, bad = stamps_of_parts(parts[0].row_numbers, month_numbers(parts[1].raw), parts[2].row_numbers)
        if bad.mean() > 0.02 or len(np.unique(stamps)) < 3:
            continue
        why = f"the date, with {month!r} and {day!r}"
        judged[year] = JudgedColumn(TimestampColumn(month=month, day=day), why)
        yield (
            f"the time of the event is the date of {year!r}, {month!r} and {day!r}; `columns.{year}=categorical` "
            "reads them apart"
        )
        return


def _holds(part: str, column: ColumnSample) -> bool:
    """Tells whether a column holds years, months or days of the month, by its name and its values."""
    words = names.words_of(column.name)
    if part == "month" and "month" in words and "day" not in words:
        numbers = month_numbers(column.raw)
        return bool(np.isfinite(numbers).mean() > 0.9)
    if column.numbers is None or not column.integral:
        return False
    low, high = float(np.nanmin(column.numbers)), float(np.nanmax(column.numbers))
    if part == "year":
        return "year" in words and low > 1900 and high < 2100
    named = bool(words & {"day", "dayof", "date", "dom", "mday"}) and not words & {"week", "year"}
    return part == "day" and named and low >= 1 and 7 < high <= 31
