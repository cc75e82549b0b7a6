"""Infers a LogSchema from the first rows of a log: a draft that an engineer would have written, to be edited.

Known formats (Criteo, Avazu) have known roles; for any other log `roles.rules` judges each column.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dhen.errors import UserError, listed, unknown_name
from trials.data.log_schema import (
    CategoricalColumn,
    Column,
    IgnoredColumn,
    LabelColumn,
    LogSchema,
    MultiHotColumn,
    NumericColumn,
    SplitRule,
    TimestampColumn,
    WeightColumn,
)
from trials.data.raw.columns import (
    DAY_MS,
    HOUR_MS,
    MISSING_STAMP,
    Stamps,
    clocks_of,
    month_numbers,
    stamps_of_parts,
)
from trials.data.raw.files import MOST_NAMED, Format, RawLog
from trials.data.raw.sources import CRITEO_COLUMNS, estimate_rows, open_log
from trials.data.raw.typed import WAYS, LabelReader, canonical, label_of, plain_label, rates_of
from trials.data.read_options import READ_AS_FOUND, ReadOptions
from trials.data.roles import names
from trials.data.roles.forms import rises, stamps_in
from trials.data.roles.outcomes import FoundSplit, find_split, settle_leaks
from trials.data.roles.rules import JudgedColumn, judge, judge_as, transform_of
from trials.data.roles.sample import ColumnSample, Sample, draw_sample
from trials.records.study_record import ColumnFinding

# Chooses the time of the event among time stamps. The others become days before the event, or are left out.
#
# The event's time is the stamp that rises along the file, as logs are written; else the one that is named like
# it.

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
    date = judged[event].column
    if not np.any(stamps[event][stamps[event] != MISSING_STAMP] % DAY_MS):
        for name, judgement in judged.items():  # another column may have the time of day beside the date
            column = sample.columns[name]
            text = column.numbers is None and not pa.types.is_nested(column.kind) and column.distinct
            if judgement.given or not names.suggests_time(name) or not text:
                continue
            if not clocks_of(column.values)[1].any():
                judged[event] = replace(judged[event], column=date.replace(time=name))
                judged[name] = JudgedColumn(IgnoredColumn(), f"the time of day of {event!r}", sentence="")
                break
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


def _join_date(judged: dict[str, JudgedColumn], sample: Sample) -> Iterator[str]:
    """Finds a date in three columns and makes the year the time stamp; month and day stay what they are."""
    years, months, days = list[str](), list[str](), list[str]()
    for name, column in sample.columns.items():  # by their names and their values
        words = names.words_of(name)
        if "month" in words and "day" not in words and np.isfinite(month_numbers(column.raw)).mean() > 0.9:
            months.append(name)
        if column.numbers is None or not column.integral:
            continue
        low, high = float(np.nanmin(column.numbers)), float(np.nanmax(column.numbers))
        if "year" in words and low > 1900 and high < 2100:
            years.append(name)
        named = words & {"day", "dayof", "date", "dom", "mday"} and not words & {"week", "year"}
        if named and low >= 1 and 7 < high <= 31:
            days.append(name)
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


UNDECIDED = SplitRule(by="auto")
MOST_BUCKETS = 256
ROWS_PER_BUCKET = 100
MOST_LISTED = 30
"""Number of columns that are named if one is to be chosen."""
MOST_SHOWN = 40
"""Number of characters of a value that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredSchema:
    """A schema, and why it is so."""

    schema: LogSchema
    findings: tuple[ColumnFinding, ...]
    """What was found of each column, in the log's order."""
    sentences: tuple[str, ...]
    """Sentences on what was decided and may be wanted otherwise, the most important first."""
    rows: int
    """Number of rows that were looked at."""
    rows_of_log: int
    """Number of rows of the log, which is an estimate if not all were looked at."""
    complete: bool
    """Whether all were looked at."""


def infer_schema(sources: Sequence[Path], options: ReadOptions = READ_AS_FOUND) -> LogSchema:
    """Infers the schema of a log (files, or folders of files) from its first rows.

    Raises:
        UserError: for files that cannot be read, when there is no label column or one with more than two
            values, or when no column is a feature.
    """
    return infer(open_log(sources, options.format, options.csv), options).schema


def infer(log: RawLog, options: ReadOptions = READ_AS_FOUND) -> InferredSchema:
    """Infers the schema of a log as `infer_schema` does, with notes."""
    label, rule, impressions = find_label(log, options.label)
    weight = impressions or options.weight
    if weight is not None and (weight not in log.columns or weight == label):
        raise unknown_name("weight column", weight, [name for name in log.columns if name != label])
    for name in options.columns:
        if name not in log.columns:
            raise UserError(f"columns.{name}: {unknown_name('column', name, log.columns)}")
    sample = draw_sample(log, log.columns, skip_bad_rows=options.skip_bad_rows)
    if not sample.rows:
        raise UserError(f"{log.describe()}: the log holds no rows, only a header.")
    judged: dict[str, JudgedColumn] = {}
    for name, column in sample.columns.items():
        if name == label:
            judged[name] = _label(column, rule, options)
        elif name in options.columns:
            judged[name] = judge_as(column, options.columns[name])
        else:
            judged[name] = _judge(log, column, sample)
    if weight is not None:
        for name in (name for name, each in judged.items() if isinstance(each.column, WeightColumn)):
            judged[name] = JudgedColumn(IgnoredColumn(), f"a weight; {weight!r} is used")
        judged[weight] = JudgedColumn(WeightColumn(), "as you said", given=True)
    leaks = [*settle_leaks(judged, sample, _sample_labels(log, sample.columns[label], judged[label]))]
    times = [*settle_time(judged, sample)]
    stamped = any(isinstance(judgement.column, TimestampColumn) for judgement in judged.values())
    split = SplitRule(by="timestamp" if stamped else "order")
    found = _splits(log, label, sample, split, skip_bad_rows=options.skip_bad_rows)
    judged |= {name: each.judged for name, each in found.items() if name not in options.columns}
    rows = estimate_rows(log)
    columns = {name: judgement.column for name, judgement in judged.items()}
    for name, each in columns.items():  # what depends on the size of the log
        if isinstance(each, CategoricalColumn | MultiHotColumn):
            columns[name] = each.replace(min_count=default_min_count(rows))
        elif isinstance(each, NumericColumn):
            columns[name] = each.replace(buckets=default_buckets(rows))
    if not any(
        isinstance(each, CategoricalColumn | MultiHotColumn | NumericColumn) for each in columns.values()
    ):
        others = [f"{name} ({judgement.why})" for name, judgement in judged.items() if name != label]
        raise UserError(
            f"{log.describe()}: no column besides the label {label!r} seems to be a feature"
            + (f": {listed(others, MOST_NAMED)}." if others else ".")
        )
    schema = LogSchema(
        columns=columns,
        split=next(
            (each.rule for each in found.values() if each.rule is not None), split if stamped else UNDECIDED
        ),
        csv=log.csv,
    )
    own = [judgement.sentence for judgement in judged.values() if judgement.sentence]
    splits = [each.sentence for each in found.values()]
    return InferredSchema(
        schema=schema,
        findings=tuple(_finding(judged[name], sample.columns[name]) for name in log.columns),
        sentences=(*leaks, *times, *splits, *own, *_unused(judged, log)),
        rows=sample.rows,
        rows_of_log=sample.rows if sample.complete else rows,
        complete=sample.complete,
    )


def _finding(judgement: JudgedColumn, column: ColumnSample) -> ColumnFinding:
    example = str(column.values[0]) if column.distinct else ""
    missing = column.missing / column.rows
    if isinstance(judgement.column, TimestampColumn) and not judgement.column.parts:
        missing = float(np.mean(stamps_in(column, judgement.column) == MISSING_STAMP))
    elif isinstance(judgement.column, NumericColumn) and column.numbers is not None:
        missing = float(np.mean(np.isnan(column.row_numbers)))
    return ColumnFinding(
        name=column.name,
        role=judgement.column.role,
        why=judgement.why,
        distinct=column.distinct,
        missing=missing,
        example=example if len(example) <= MOST_SHOWN else f"{example[: MOST_SHOWN - 1]}…",
    )


def _unused(judged: Mapping[str, JudgedColumn], log: RawLog) -> Iterator[str]:
    by_note = defaultdict[str, list[str]](list)
    for name, file in log.lacking().items():
        by_note[f"{file} has no such column"].append(repr(name))
    for name, judgement in judged.items():
        if isinstance(judgement.column, IgnoredColumn) and judgement.sentence is None:
            by_note[judgement.why].append(repr(name))
    for note, unused in by_note.items():
        yield f"not used: {listed(unused, MOST_NAMED)} ({note})"


def find_label(log: RawLog, requested: str | None) -> tuple[str, LabelColumn, str | None]:
    """Returns the label column, its rule and its column of impressions as `label_of` does; or the first by name.

    Raises:
        UserError: when there is none; it lists the columns.
    """
    if requested is not None:
        try:
            return label_of(requested, log.columns)
        except UserError as error:
            raise UserError(f"{log.describe()}: {error}") from None
    by_name = {names.plain(name): name for name in reversed(log.columns)}
    label = next((by_name[name] for name in names.LABELS if name in by_name), None)
    if label is None:
        raise UserError(
            f"{log.describe()}: no label column found (looked for {', '.join(names.LABELS)}). Pass "
            f"label=NAME with one of: {listed(log.columns, MOST_LISTED)}. {WAYS}."
        )
    return label, LabelColumn(), None


def default_min_count(rows: int) -> int:
    """Returns how often a value must occur for an id of its own: 2 below a million rows, 5 below ten million, then
    10.

    Ten is what work on the full Criteo logs commonly takes; small logs can afford to keep more.
    """
    return 2 if rows < 1_000_000 else 5 if rows < 10_000_000 else 10


def default_buckets(rows: int) -> int:
    """Returns the largest number of buckets: 256, or fewer, with a hundred rows each
    (docs/benchmarks/buckets.md)."""
    return max(2, min(MOST_BUCKETS, rows // ROWS_PER_BUCKET))


def _judge(log: RawLog, column: ColumnSample, sample: Sample) -> JudgedColumn:
    criteo = CRITEO_COLUMNS[1:]
    known: Column
    if log.format is Format.AVAZU:
        if column.name == "hour":
            known = TimestampColumn(format="yymmddhh")
        else:
            known = IgnoredColumn() if column.name == "id" else CategoricalColumn()
        return JudgedColumn(known, "a column of the Avazu log")
    if column.name in criteo and set(criteo) <= set(log.columns):  # with a header and further columns, too
        known = NumericColumn(transform="log") if column.name.startswith("I") else CategoricalColumn()
        return JudgedColumn(known, "a column of the Criteo log")
    judgement = judge(column)
    if isinstance(judgement.column, IgnoredColumn) and not sample.complete:
        return replace(judgement, why=f"{judgement.why}, in the first {sample.rows:,} rows")
    return judgement


def _label(column: ColumnSample, rule: LabelColumn, options: ReadOptions) -> JudgedColumn:
    """Returns the label column; of two values that do not say which is the click, the rarer one is taken for
    it. One that was named is a rate if its values are from 0 to 1, and more than two, or weighted."""
    if rule != LabelColumn():
        return JudgedColumn(rule, "the label, by a rule")
    if options.label is not None:
        rates, unreadable = rates_of(column.values)
        known = rates[~np.isnan(rates)]
        fractions = bool(np.any(known % 1)) and (len(known) > 2 or options.weight is not None)
        if fractions and not unreadable.any() and known.min() >= 0 and known.max() <= 1:
            return JudgedColumn(LabelColumn(share="rate"), "the label: a rate")
    values: Counter[str] = Counter()
    for value, count in zip(column.values.to_pylist(), column.counts.tolist(), strict=True):
        values[canonical(value)] += count
    positive = None
    if len(values) == 2 and None in map(plain_label, values):
        positive = min(values, key=lambda value: values[value])
    why = "the label" if positive is None else "the rarer value; change it if the other is the positive one"
    return JudgedColumn(LabelColumn(positive=positive), why)


def _sample_labels(log: RawLog, column: ColumnSample, judgement: JudgedColumn) -> NDArray[np.float64]:
    """Returns the labels of the sample's rows (N), NaN if missing; of a share, whether there is a click.

    Raises:
        UserError: for a label of more than two values.
    """
    assert isinstance(judgement.column, LabelColumn)
    if judgement.column.share is not None:
        numbers, _ = rates_of(column.raw)
        return np.where(np.isnan(numbers), np.nan, numbers > 0)
    labels, missing, _ = LabelReader(column.name, judgement.column, log.describe()).read(column.raw)
    return np.where(missing, np.nan, labels)


def _splits(
    log: RawLog, label: str, sample: Sample, rule: SplitRule, *, skip_bad_rows: bool
) -> dict[str, FoundSplit]:
    """Returns the columns that say how the log is split, the first of several with a rule."""
    found: dict[str, FoundSplit] = {}
    for name, column in sample.columns.items():
        split = find_split(log, column, rule, skip_bad_rows=skip_bad_rows) if name != label else None
        if split is not None:
            chosen = next((other for other, earlier in found.items() if earlier.rule is not None), None)
            if chosen and split.rule is not None:
                judged = JudgedColumn(IgnoredColumn(), f"a split ({split.judged.why}); {chosen!r} is used")
                sentence = (
                    f"the column {name!r} looks like a split too: it is no feature, and {chosen!r} is used"
                )
                split = FoundSplit(judged, None, sentence)
            found[name] = split
    return found
