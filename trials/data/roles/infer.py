"""Infers a LogSchema from the first rows of a log: a draft that an engineer would have written, to be edited.

Known formats (Criteo, Avazu) have known roles; for any other log `roles.rules` judges each column.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
)
from trials.data.raw.files import Format, RawLog
from trials.data.raw.labels import LabelReader, canonical, plain_label
from trials.data.raw.sources import CRITEO_COLUMNS, estimate_rows, open_log
from trials.data.read_options import READ_AS_FOUND, ReadOptions
from trials.data.roles import names
from trials.data.roles.rules import JudgedColumn, judge, seen
from trials.data.roles.sample import ColumnSample, Sample, draw_sample
from trials.data.roles.split_columns import FoundSplit, find_split

MOST_BUCKETS = 256
ROWS_PER_BUCKET = 100
MOST_NAMED = 5
"""Number of columns that a sentence names."""
MOST_LISTED = 30
"""Number of columns that are named where one is to be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredSchema:
    """A schema, and what was seen of each column."""

    schema: LogSchema
    notes: dict[str, str]
    """Notes on what was seen, by column."""
    sentences: tuple[str, ...] = ()
    """Sentences on what was decided about the split, and which columns are not used, and why."""


def infer_schema(sources: Sequence[Path], options: ReadOptions = READ_AS_FOUND) -> LogSchema:
    """Infers the schema of a log (files, or folders of files) from its first rows.

    Raises:
        UserError: for files that cannot be read, when there is no label column or one with more than two
            values, or when no column is a feature.
    """
    return infer(open_log(sources, options.format, options.csv), options).schema


def infer(log: RawLog, options: ReadOptions = READ_AS_FOUND) -> InferredSchema:
    """Infers the schema of a log as `infer_schema` does, with notes."""
    skip_bad_rows = options.skip_bad_rows
    label = find_label(log, options.label)
    sample = draw_sample(log, log.columns, skip_bad_rows=skip_bad_rows)
    if not sample.rows:
        raise UserError(f"{log.describe()}: the log holds no rows, only a header.")
    judged = {name: _judge(log, name, label, sample) for name in log.columns}
    _keep_finest_stamp(judged, sample)
    stamped = any(isinstance(judgement.column, TimestampColumn) for judgement in judged.values())
    rule = SplitRule(by="timestamp" if stamped else "order")
    found = _splits(log, label, sample, rule, skip_bad_rows=skip_bad_rows)
    judged |= {name: split.judged for name, split in found.items()}
    _check_features(log, label, judged)
    rows = estimate_rows(log)
    schema = LogSchema(
        columns={name: _for_rows(judgement.column, rows) for name, judgement in judged.items()},
        split=next((split.rule for split in found.values() if split.rule is not None), rule),
        csv=log.csv,
    )
    notes = {name: judgement.note for name, judgement in judged.items()}
    sentences = (*(split.sentence for split in found.values()), *_unused(judged, log))
    return InferredSchema(schema=schema, notes=notes, sentences=sentences)


def _unused(judged: Mapping[str, JudgedColumn], log: RawLog) -> Iterator[str]:
    by_note = defaultdict[str, list[str]](list)
    for name, file in log.lacking().items():
        by_note[f"{file} has no such column"].append(repr(name))
    for name, judgement in judged.items():
        if isinstance(judgement.column, IgnoredColumn):
            by_note[judgement.note].append(repr(name))
    for note, unused in by_note.items():
        yield f"not used: {listed(unused, MOST_NAMED)} ({note})"


def find_label(log: RawLog, requested: str | None) -> str:
    """Returns the label column: the one wanted, or the first by name.

    Raises:
        UserError: when there is none; it lists the columns.
    """
    if requested is not None:
        if requested not in log.columns:
            raise UserError(f"{log.describe()}: {unknown_name('label column', requested, log.columns)}")
        return requested
    by_name = {names.plain(name): name for name in reversed(log.columns)}
    label = next((by_name[name] for name in names.LABELS if name in by_name), None)
    if label is None:
        raise UserError(
            f"{log.describe()}: no label column found (looked for {', '.join(names.LABELS)}). Name it with "
            "label=... (`dhen-search prepare --label`, where a command has no such key), one of: "
            f"{listed(log.columns, MOST_LISTED)}."
        )
    return label


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


def _for_rows(column: Column, rows: int) -> Column:
    """Returns the column with what depends on the size of the log."""
    if isinstance(column, CategoricalColumn | MultiHotColumn):
        return column.replace(min_count=default_min_count(rows))
    if isinstance(column, NumericColumn):
        return column.replace(buckets=default_buckets(rows))
    return column


def _judge(log: RawLog, name: str, label: str, sample: Sample) -> JudgedColumn:
    column = sample.columns[name]
    if name == label:
        return _label(log, column)
    if known_role := _known_role(log, name):
        return JudgedColumn(known_role, seen(column))
    judgement = judge(column)
    if isinstance(judgement.column, IgnoredColumn) and not sample.complete:
        return JudgedColumn(judgement.column, f"{judgement.note}, in the first {sample.rows:,} rows")
    return judgement


def _label(log: RawLog, column: ColumnSample) -> JudgedColumn:
    """Returns the label column; of two values that do not say which is the click, the rarer one is taken for
    it."""
    values: Counter[str] = Counter()
    for value, count in zip(column.values.to_pylist(), column.counts.tolist(), strict=True):
        values[canonical(value)] += count
    positive = None
    if len(values) == 2 and None in map(plain_label, values):
        positive = min(values, key=lambda value: values[value])
    LabelReader(column.name, positive, log.describe()).read(column.raw)  # more than two values: an error now
    if positive is None:
        return JudgedColumn(LabelColumn(), "")
    return JudgedColumn(
        LabelColumn(positive=positive), "the rarer value; change it if the other is the positive one"
    )


def _known_role(log: RawLog, name: str) -> Column | None:
    """Returns a role by name, in logs whose columns are known: Criteo (with a header and further columns, too) and
    Avazu."""
    if log.format is Format.AVAZU:
        return _avazu_role(name)
    criteo = CRITEO_COLUMNS[1:]
    return _criteo_role(name) if name in criteo and set(criteo) <= set(log.columns) else None


def _criteo_role(name: str) -> Column:
    return NumericColumn(transform="log") if name.startswith("I") else CategoricalColumn()


def _avazu_role(name: str) -> Column:
    if name == "hour":
        return TimestampColumn(format="yymmddhh")
    return IgnoredColumn() if name == "id" else CategoricalColumn()


def _keep_finest_stamp(judged: dict[str, JudgedColumn], sample: Sample) -> None:
    """Keeps, of several time stamps, the one with most values; a stamp that could not split the log is dropped."""
    stamps = [name for name, judgement in judged.items() if isinstance(judgement.column, TimestampColumn)]
    if not stamps:
        return
    finest = max(stamps, key=lambda name: sample.columns[name].distinct)
    for name in stamps:
        if name != finest:
            judged[name] = JudgedColumn(IgnoredColumn(), f"a time stamp; {finest!r} has more distinct ones")
    if sample.complete and sample.columns[finest].distinct < 3:
        judged[finest] = JudgedColumn(IgnoredColumn(), "fewer than three time stamps cannot split the log")


def _splits(
    log: RawLog, label: str, sample: Sample, rule: SplitRule, *, skip_bad_rows: bool
) -> dict[str, FoundSplit]:
    """Returns the columns that say how the log is split, the first of several with a rule."""
    found: dict[str, FoundSplit] = {}
    for name, column in sample.columns.items():
        split = find_split(log, column, rule, skip_bad_rows=skip_bad_rows) if name != label else None
        if split is not None:
            chosen = next((other for other, earlier in found.items() if earlier.rule is not None), None)
            found[name] = split.left_for(chosen) if chosen else split
    return found


def _check_features(log: RawLog, label: str, judged: dict[str, JudgedColumn]) -> None:
    """Raises a UserError, with the reasons, when no column would be an input."""
    if any(
        isinstance(judgement.column, CategoricalColumn | MultiHotColumn | NumericColumn)
        for judgement in judged.values()
    ):
        return
    others = [f"{name} ({judgement.note})" for name, judgement in judged.items() if name != label]
    raise UserError(
        f"{log.describe()}: no column besides the label {label!r} seems to be a feature"
        + (f": {listed(others, MOST_NAMED)}." if others else ".")
    )
