"""Builds a cache: parse once, split, fit on the training rows, write."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dhen.fingerprint import fingerprint
from trials.data.cache import MANIFEST, VERSION, Manifest
from trials.data.encoding.encoding import Encoding
from trials.data.example_weights import ClickTotals
from trials.data.log_schema import PLAIN_CSV, SPLITS, LogSchema
from trials.data.prepare.classes import check_classes, count_clicks, plan_of
from trials.data.prepare.collisions import HashCollisions
from trials.data.prepare.fit import fit
from trials.data.prepare.staging import Progress, Staged, stage
from trials.data.prepare.write import write_splits
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows
from trials.data.raw.sources import estimate_rows
from trials.study_record import ColumnFinding

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
        deciding = [
            VERSION,
            hashes,
            names,
            str(self.log.format),
            schema.of_rows(),
            encoding,
            self.skip_bad_rows,
        ]
        dialects = [file.dialect.to_dict() for file in files if file.dialect != PLAIN_CSV]
        return fingerprint([*deciding, *dialects])

    @property
    def key(self) -> str:
        """Key by which the cache is found before the schema is resolved."""
        key = self.fingerprint(self.schema)
        return fingerprint([key, "joined"]) if self.joins_splits else key

    def needed_bytes(self) -> int:
        """Bytes that staged log and cache take together, about, from the first rows (a bag is taken for 8 ids)."""
        tables, bags, numbers = (
            len(self.schema.categorical),
            len(self.schema.multi_hot),
            len(self.schema.numeric),
        )
        staged = 4 * tables + 36 * bags + 8 * numbers + 21
        cache = 4 * (tables + len(self.schema.bucketed)) + 40 * bags + 5 * numbers + 24
        return estimate_rows(self.log) * (staged + cache) * (2 if self.schema.pairs else 1)


def build(request: Request, directory: Path, progress: Progress) -> None:
    """Fills an empty directory with the cache.

    Raises:
        UserError: for rows that cannot be used, or a split without both classes.
    """
    schema, bad_rows = request.schema, BadRows(skip=request.skip_bad_rows)
    staging = directory / "staged.arrow"
    with ThreadPoolExecutor(THREADS) as pool:
        staged = stage(request.log, schema, staging, bad_rows=bad_rows, pool=pool, progress=progress)
        schema, reason = _decided(request, staged)
        plan = plan_of(staged, schema.split)
        totals = count_clicks(staged, plan, schema)
        if not request.joins_splits:
            check_classes(totals, staged, schema)
        collisions = {name: HashCollisions() for name in schema.tables if schema.growing(name)}
        given = request.encoding.with_schema(schema) if request.encoding else None
        encoding = given or fit(staged, plan, schema, pool, progress, collisions)
        write_splits(staged, plan, encoding, directory, pool, progress)
    staging.unlink()
    encoding.save(directory / "encoding")
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
        ne_floor=_ne_floors(totals) if schema.oracle else None,
        notes=(
            *request.sentences,
            *([reason] if reason else []),
            *bad_rows.notes(),
            *_notes(staged, schema, encoding.schema),
            *_collision_notes(collisions),
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


def _decided(request: Request, staged: Staged) -> tuple[LogSchema, str]:
    """Returns the schema with its rule for the split decided, and a sentence on the decision; empty for none."""
    schema = request.schema
    if schema.split.by != "auto":
        return schema, ""
    if schema.timestamp or request.joins_splits:  # joined, they are gone through in the order of the log
        return schema.replace(split=schema.split.replace(by="timestamp" if schema.timestamp else "order")), ""
    by, why = staged.row_order.rule()
    ways = ("by their order", "at random")
    way, other = ways if by == "order" else reversed(ways)
    sentence = (
        f"rows are split {way}, as the log has no time stamps and {why}; split.by="
        f"{'random' if by == 'order' else 'order'} splits them {other}"
    )
    return schema.replace(split=schema.split.replace(by=by)), sentence if why else ""


def _ne_floors(totals: Mapping[str, ClickTotals]) -> dict[str, float] | None:
    """Returns NE floors by split; None where a true probability is missing."""
    floors = {name: clicks.ne_floor for name, clicks in totals.items()}
    return floors if all(math.isfinite(floor) for floor in floors.values()) else None


def _notes(staged: Staged, schema: LogSchema, resolved: LogSchema) -> list[str]:
    """Returns what was decided and is worth knowing."""
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
    return notes


def _collision_notes(collisions: Mapping[str, HashCollisions]) -> list[str]:
    """Returns which growing tables have values that share a row because they share a hash."""
    counted = {name: (each.hashes, each.share) for name, each in collisions.items()}
    return [
        f"{name!r}: {hashes:,} hashes stand for several values each, which share a row"
        + (f" (counted in {100 * share:.2g} % of its values)" if share < 1 else "")
        for name, (hashes, share) in counted.items()
        if hashes
    ]
