"""Prepares a log: from raw files to a cache that every trial reuses.

Memory is bounded by the distinct values of the log, not by its rows. The cache is found again by content,
and appears whole or not at all.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dhen.errors import UserError
from dhen.values import fingerprint, parse
from trials.data.encoding import Encoding
from trials.data.log_schema import PLAIN_CSV, SPLITS, LabelColumn, LogSchema, SplitBy, SplitRule
from trials.data.prepare.fit import HashCollisions, fit
from trials.data.prepare.staging import Progress, StagedLog, stage
from trials.data.prepare.write import check_classes, count_clicks, plan_of, write_splits
from trials.data.prepared_log import MANIFEST, VERSION, Manifest, PreparedLog
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows
from trials.data.raw.sources import estimate_rows, open_log
from trials.data.raw.typed import label_of
from trials.data.read_options import READ_AS_FOUND, ReadOptions
from trials.data.roles.infer import infer
from trials.data.schema_yaml import check_columns, read_schema, schema_to_yaml, with_roles
from trials.records.study_record import ColumnFinding
from trials.store.user_cache import built, locked, user_cache

# Builds a cache: parse once, split, fit on the training rows, write.

_AUTO = re.compile(r"^(split: \{[^#\n]*by: auto[^#\n]*\}).*$", re.MULTILINE)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = min(16, CORES)
"""Number of threads in which columns are typed, counted and encoded side by side, on all cores that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The log to be prepared, and how."""

    log: RawLog
    schema: LogSchema
    schema_text: str
    """Text of the schema.yaml to be written: the schema, with its comments."""
    encoding: Encoding | None
    """Encoding that is used instead of fitting one."""
    skip_bad_rows: bool
    joins_splits: bool = False
    """Says whether the log is for a reader that joins the splits, each of which may then be of one class."""
    findings: tuple[ColumnFinding, ...] = ()
    """What was found of each column when the schema was inferred."""
    sentences: tuple[str, ...] = ()
    """Sentences that were said when the schema was inferred."""

    def fingerprint(self, schema: LogSchema) -> str:
        """Returns the hash of all that decides what the cache holds, with this schema for the log."""
        files = self.log.files
        by_name = schema.splits_by_file or any(file.partition for file in files)
        names = [file.name for file in files] if by_name else []
        encoding = self.encoding.fingerprint if self.encoding else None
        hashes = [file.facts.sha256 for file in files]
        written = str(self.log.format)
        deciding = [VERSION, hashes, names, written, schema.of_rows(), encoding, self.skip_bad_rows]
        dialects = [file.dialect.to_dict() for file in files if file.dialect != PLAIN_CSV]
        return fingerprint([*deciding, *dialects])

    @property
    def key(self) -> str:
        """Key by which the cache is found before the schema is resolved."""
        key = self.fingerprint(self.schema)
        return fingerprint([key, "joined"]) if self.joins_splits else key

    def needed_bytes(self) -> int:
        """Bytes that staged log and cache take together, about, from the first rows (a bag is taken for 8 ids)."""
        schema = self.schema
        tables, bags, numbers = len(schema.categorical), len(schema.multi_hot), len(schema.numeric)
        staged = 4 * tables + 36 * bags + 8 * numbers + 21
        cache = 4 * (tables + len(schema.bucketed)) + 40 * bags + 5 * numbers + 24
        return estimate_rows(self.log) * (staged + cache) * (2 if schema.pairs else 1)


def build(request: Request, directory: Path, progress: Progress) -> None:
    """Fills an empty directory with the cache.

    Raises:
        UserError: for rows that cannot be used, or a split without both classes.
    """
    schema, bad_rows = request.schema, BadRows(skip=request.skip_bad_rows)
    staging = directory / "staged.arrow"
    with ThreadPoolExecutor(THREADS) as pool:
        staged = stage(request.log, schema, staging, bad_rows=bad_rows, pool=pool, progress=progress)
        reasons = []
        if schema.split.by == "auto":
            by: SplitBy = "timestamp" if schema.timestamp else "order"
            if by == "order" and not request.joins_splits:  # joined, they are read in the order of the log
                by, why = staged.row_order.rule()
                ways = {"order": "by their order", "random": "at random"}
                other = "random" if by == "order" else "order"
                reasons = [
                    f"rows are split {ways[by]}, as the log has no time stamps and {why}; split.by={other} splits "
                    f"them {ways[other]}"
                ]
                reasons = reasons if why else []
            schema = schema.replace(split=schema.split.replace(by=by))
        plan = plan_of(staged, schema.split)
        totals = count_clicks(staged, plan, schema)
        if not request.joins_splits:
            check_classes(totals, staged, schema)
        collisions = {name: HashCollisions() for name in schema.tables if schema.growing(name)}
        given = replace(request.encoding, schema=schema) if request.encoding else None
        encoding = given or fit(staged, plan, schema, pool, progress, collisions)
        write_splits(staged, plan, encoding, directory, pool, progress)
    staging.unlink()
    encoding.save(directory / "encoding")
    floors: dict[str, float] | None = None
    if schema.oracle:
        floors = {name: clicks.ne_floor for name, clicks in totals.items()}
        if not all(map(math.isfinite, floors.values())):  # a true probability is missing
            floors = None
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*.*")}
    manifest = Manifest(
        version=VERSION,
        name=request.log.name,
        key=request.key,
        fingerprint=request.fingerprint(encoding.schema),
        schema_fingerprint=fingerprint(request.schema.to_dict()),
        rows={name: totals[name].rows for name in SPLITS},
        base_rate={name: totals[name].base_rate for name in SPLITS},
        chronological=staged.stamps is not None and staged.stamps.chronological,
        ne_floor=floors,
        notes=(
            *request.sentences,
            *reasons,
            *bad_rows.notes(),
            *_notes(staged, schema, encoding.schema, collisions),
        ),
        findings=request.findings,
        sizes=dict(sorted(sizes.items())),
        checksums={
            name: zlib.crc32((directory / name).read_bytes()) for name in sizes if name.startswith("encoding")
        },
    )
    text = _AUTO.sub(rf"\1  # {schema.split.by} for this log", request.schema_text)
    (directory / "schema.yaml").write_text(text, encoding="utf-8")
    (directory / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _notes(
    staged: StagedLog, schema: LogSchema, resolved: LogSchema, collisions: Mapping[str, HashCollisions]
) -> list[str]:
    """Returns what was decided and is worth knowing, and which growing tables have values that share a row."""
    notes = []
    label = schema.label_column
    if label.positive is not None or label.where is not None:
        rule = label.where or f"is {label.positive!r}"
        notes.append(f"the label is 1 where {schema.label!r} {rule}")
    if label.share is not None:
        kind = "a click rate or probability" if label.share == "rate" else "a number of clicks"
        notes.append(
            f"the label {schema.label!r} is {kind}: a row becomes two, with label 1 and 0, which share "
            f"{repr(schema.weight) if schema.weight else 'a weight of 1'}"
        )
    if staged.stamps and staged.stamps.missing and schema.split.by == "timestamp":
        notes.append(f"training rows for want of a time stamp: {staged.stamps.missing:,}")
    for cycle in schema.cycles:
        if cycle not in resolved.cycles:
            notes.append(f"no table {cycle}: the training rows do not span it")
    for derived, name in schema.bucketed.items():
        if derived not in resolved.bucketed:
            notes.append(f"no table {derived}: {name!r} does not vary in the training rows")
    for name in resolved.tables:
        if (growing := resolved.growing(name)) is not None:
            notes.append(
                f"{name!r} has a growing table of {growing.capacity:,} rows at most; values that are missing, or "
                f"occur fewer than {growing.admit_after} times, share one more"
            )
    for name, table in resolved.tables.items():
        if schema.tables[name].hash_buckets == "auto" and table.hash_buckets:
            notes.append(
                f"{name!r} has so many values that they are hashed into {table.hash_buckets:,} buckets"
            )
    for name, counted in collisions.items():
        if hashes := counted.hashes:
            part = f" (counted in {100 * counted.share:.2g} % of its values)" if counted.share < 1 else ""
            notes.append(
                f"{name!r}: {hashes:,} hashes stand for several values each, which share a row{part}"
            )
    return notes


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
        log = PreparedLog.open(sources[0])
        elsewhere = out is not None and Path(out).resolve() != sources[0].resolve()
        as_found = READ_AS_FOUND
        if not _label_differs(options, log.schema, log.schema.columns):
            as_found = as_found.replace(label=options.label, weight=options.weight)
        said = any(getattr(options, key) != getattr(as_found, key) for key in ReadOptions.model_fields)
        if schema is not None or encoding is not None or elsewhere or said:
            raise UserError(
                f"{sources[0]}: this log is prepared already; name the raw files to prepare them differently."
            )
        return log
    request = _request(sources, out, options, schema, encoding, of_another_log)
    request = replace(request, joins_splits=joins_splits)
    target = Path(out).resolve() if out is not None else user_cache() / request.key
    with locked(target):
        if PreparedLog.is_prepared(target):
            with suppress(UserError):  # damaged, edited, or of another version: it is built anew
                existing = PreparedLog.open(target)
                if existing.manifest.key == request.key:
                    return existing
        elif target.is_file() or (
            target.is_dir() and any(path.name != "schema.yaml" for path in target.iterdir())
        ):
            raise UserError(
                f"{target} is no prepared log and not empty; name an empty directory or a new one."
            )
        with built(target, request.needed_bytes()) as directory:
            build(request, directory, progress or (lambda step, rows_done, total: None))
    return PreparedLog.open(target)


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
        of_rows = {"split": rules.split, "negative_sampling_rate": rules.negative_sampling_rate}
        (schema, sentences), source = _fitting(encoding.schema.replace(**of_rows), log), "the encoding"
    elif schema is None:
        inferred = infer(log, options)
        schema, findings, sentences = inferred.schema, inferred.findings, inferred.sentences
    elif of_another_log:
        schema, sentences = _fitting(schema, log)
    if not findings and encoding is None:
        schema = with_roles(schema, options.columns)
    whole = schema
    split = {"split": options.split.rule(schema)}
    schema = parse(LogSchema, schema.to_dict() | split, "the split").replace(csv=log.csv)
    if encoding is None:
        schema = options.growing.applied_to(schema)
    else:
        encoding = replace(encoding, schema=schema)
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


def _fitting(schema: LogSchema, log: RawLog) -> tuple[LogSchema, tuple[str, ...]]:
    """Returns the schema of another log for this one, which may lack columns that are no input; and what is said
    if it lacks what the split lists."""
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
