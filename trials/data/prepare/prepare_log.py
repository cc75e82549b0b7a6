"""Prepares a log: from raw files to a cache that every trial reuses.

Memory is bounded by the distinct values of the log, not by its rows. The cache is found again by content,
and appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dhen.errors import UserError
from dhen.values import parse
from trials.data.cache import PreparedLog
from trials.data.encoding.encoding import Encoding
from trials.data.log_schema import LabelColumn, LogSchema, SplitRule
from trials.data.prepare.build import Request, build
from trials.data.prepare.locked_directory import built, locked
from trials.data.prepare.staging import Progress
from trials.data.raw.files import RawLog
from trials.data.raw.labels import label_of
from trials.data.raw.sources import open_log
from trials.data.read_options import READ_AS_FOUND, GivenSplit, ReadOptions
from trials.data.roles.infer import infer
from trials.data.schema_yaml import check_columns, read_schema, schema_to_yaml, with_roles
from trials.study_record import ColumnFinding
from trials.user_cache import user_cache


def prepare(
    sources: Sequence[Path],
    *,
    out: Path | None = None,
    options: ReadOptions = READ_AS_FOUND,
    schema: LogSchema | None = None,
    encoding: Encoding | None = None,
    of_another_log: bool = False,
    joins_splits: bool = False,
    progress: Progress | None = None,
) -> PreparedLog:
    """Prepares a log, or opens the cache it was prepared into before.

    Args:
        sources: files or folders of one log; or the directory of one prepared log, which is opened.
        out: where the cache goes. None: below $DHEN_SEARCH_CACHE, else ~/.cache/dhen-search, by content. A
            prepared log that is there already is replaced when it is another one; its schema.yaml, edited
            or not, is used when `schema` is None.
        options: what is said of how the log is read, beside its schema.
        schema: roles of the columns; None infers them from the first rows.
        encoding: one that was fitted before, used instead of fitting. Columns then have the roles they had
            for it, and of `schema` only the split and the negative sampling rate count.
        of_another_log: whether `schema` was made for another log, so that this one may lack columns that are no
            input, and what its split lists: then rows are split by fractions. An encoding always is.
        joins_splits: whether the splits will be joined, each of which may then be of one class.
        progress: called with a step's name, rows done and about how many there are.

    Raises:
        UserError: for anything about the files, the schema or the disk that a user can mend.
    """
    sources = [Path(source) for source in sources]
    if len(sources) == 1 and PreparedLog.is_prepared(sources[0]):
        return _open_prepared(sources[0], out, options, given=schema is not None or encoding is not None)
    request = _request(sources, out, options, schema, encoding, of_another_log)
    request = replace(request, joins_splits=joins_splits)
    target = Path(out).resolve() if out is not None else user_cache() / request.key
    with locked(target):
        if (existing := _existing(target, request.key)) is not None:
            return existing
        with built(target, request.needed_bytes()) as directory:
            build(request, directory, progress or _silent)
    return PreparedLog.open(target)


def _silent(step: str, rows_done: int, total: int | None) -> None:
    """Reports no progress."""


def _open_prepared(source: Path, out: Path | None, options: ReadOptions, *, given: bool) -> PreparedLog:
    """Opens a log that is prepared already; `given`: whether a schema or an encoding was given for it."""
    log = PreparedLog.open(source)
    elsewhere = out is not None and Path(out).resolve() != source.resolve()
    as_found = READ_AS_FOUND
    if not _label_differs(options, log.schema, log.schema.columns):
        as_found = as_found.replace(label=options.label, weight=options.weight)
    said = any(getattr(options, key) != getattr(as_found, key) for key in ReadOptions.model_fields)
    if given or elsewhere or said:
        raise UserError(
            f"{source}: this log is prepared already; name the raw files to prepare them differently."
        )
    return log


def _request(
    sources: Sequence[Path],
    out: Path | None,
    options: ReadOptions,
    schema: LogSchema | None,
    encoding: Encoding | None,
    of_another_log: bool,
) -> Request:
    """Settles the schema: the encoding's, the one given, the one in the output directory, or an inferred one."""
    edited = Path(out) / "schema.yaml" if out is not None else None
    source, text = "the schema", None
    findings: tuple[ColumnFinding, ...] = ()
    if encoding is None and schema is None and edited is not None and edited.is_file():
        schema, source, text = read_schema(edited), str(edited), edited.read_text(encoding="utf-8")
    known = encoding.schema if encoding is not None else schema
    csv = options.csv
    if known is not None and encoding is None and not of_another_log:
        csv = csv.over(known.csv)  # it was said of these files
    log = open_log(sources, options.format, csv, known.csv if known is not None else None)
    sentences: tuple[str, ...] = ()
    if encoding is not None:
        rules = schema or encoding.schema
        combined = encoding.schema.replace(
            split=rules.split, negative_sampling_rate=rules.negative_sampling_rate
        )
        (schema, sentences), source = _fitting(combined, log), "the encoding"
    elif schema is None:
        inferred = infer(log, options)
        schema, findings, sentences = inferred.schema, inferred.findings, inferred.sentences
    elif of_another_log:
        schema, sentences = _fitting(schema, log)
    if not findings and encoding is None:
        schema = with_roles(schema, options.columns)
    schema, whole = _with_split(schema, options.split).replace(csv=log.csv), schema
    encoding = encoding.with_schema(schema) if encoding is not None else None
    if encoding is None:
        schema = options.growing.applied_to(schema)
    check_columns(schema, log.columns, source)
    if _label_differs(options, schema, log.columns):
        given = " ".join(f"{key}={text}" for key in ("label", "weight") if (text := getattr(options, key)))
        weight = f" weight={schema.weight}" if schema.weight and options.weight else ""
        own = (schema.label_column.where or "") + weight
        raise UserError(f"{given} is given, but {source} says label={schema.label}{own}: change one of them.")
    return Request(
        log=log,
        schema=schema,
        schema_text=text if text and schema == whole else schema_to_yaml(schema, findings),
        encoding=encoding,
        skip_bad_rows=options.skip_bad_rows,
        findings=findings,
        sentences=(*log.notes(), *sentences),
    )


def _label_differs(options: ReadOptions, schema: LogSchema, columns: Collection[str]) -> bool:
    """Says whether another label or weight is given than a schema has.

    Raises:
        UserError: for a label that is none of these columns, nor made of them.
    """
    weight = options.weight
    if options.label is not None:
        label, rule, impressions = label_of(options.label, columns)
        weight = weight or impressions
        if label != schema.label or rule not in (LabelColumn(), schema.label_column):
            return True
    return weight is not None and weight != schema.weight


def _with_split(schema: LogSchema, given: GivenSplit) -> LogSchema:
    return parse(LogSchema, schema.to_dict() | {"split": given.rule(schema)}, "the split")


def _fitting(schema: LogSchema, log: RawLog) -> tuple[LogSchema, tuple[str, ...]]:
    """Returns the schema of another log for this one, which may lack columns that are no input; and what is said
    where it lacks what the split lists."""
    columns = {
        name: column
        for name, column in schema.columns.items()
        if name in log.columns or column.role not in ("ignore", "oracle", "split")
    }
    split = schema.split
    sentences: tuple[str, ...] = ()
    files = {file.name for file in log.files}
    listed = {*split.names("validation"), *split.names("test")}
    without_column = schema.split_column is not None and schema.split_column not in columns
    if without_column or (schema.splits_by_file and not listed <= files):
        split = SplitRule(by="timestamp" if schema.timestamp else "order")
        lacking = f"column {schema.split_column!r}" if without_column else f"file {min(listed - files)!r}"
        sentences = (f"the log has no {lacking} to be split by: it is split by {split.by}",)
    rest = {"columns": columns, "split": split, "negative_sampling_rate": schema.negative_sampling_rate}
    return parse(LogSchema, rest, "the schema"), sentences


def _existing(target: Path, key: str) -> PreparedLog | None:
    """Returns the prepared log at the target, if it is the one wanted, and whole."""
    if not PreparedLog.is_prepared(target):
        if target.is_file() or (
            target.is_dir() and any(path.name != "schema.yaml" for path in target.iterdir())
        ):
            raise UserError(
                f"{target} is no prepared log and not empty; name an empty directory or a new one."
            )
        return None
    try:
        log = PreparedLog.open(target)
    except UserError:
        return None  # damaged, edited, or of another version: it is built anew
    return log if log.manifest.key == key else None
