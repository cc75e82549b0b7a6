"""Writes a demo log to Parquet, a group of rows at a time, with a note beside it that says what it is.

The file's metadata holds the settings it was made from; a complete file of equal settings is kept as it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.data.demo.columns import CATEGORICAL, COUNTER, COUNTS, MULTI_HOT, IdColumn
from trials.data.demo.examples import MISSING, START, Examples, Floats, Ints, draw_examples
from trials.data.demo.spec import DemoLog
from trials.data.demo.teacher import Teacher, probability
from trials.data.demo.visits import populations, with_visits
from trials.data.prepare.staging import Progress
from trials.data.roles.names import ORACLE

_GROUP = 1 << 16
"""Number of rows that are drawn and written at a time."""
_GENERATOR = 1
"""Version of the generator, which goes up when equal settings give another log than before."""
_KEY = b"demo_log"
_PLAIN = {"rows", "seed", "base_rate", "logit_deviation", "shares"}
"""Settings that every log's metadata has."""
_NOTE = """\
{name}: a GENERATED click log. No person clicked anything here, and no real log was used.

It is the built-in demo of dhen-search. Labels were drawn from a known teacher, and the column
{oracle} holds the probability that each label was drawn with. It must never be a model
input; it serves to compute the lowest NE that any model can reach on these rows.

  label       1 click, 0 no click
  timestamp   ten days in time order, UTC
{context}{visits}
Made from these settings (equal settings give an equal log):

{settings}
"""
_CONTEXT = """\
  I1 .. I13   counts, some missing; 0 is a value of its own. I13 counts the clicks among the
              last 10,000 impressions, and so reports the slow drift of the base rate, which
              has a daily cycle too
  C1 .. C26   categorical, 4 to {most_ids:,} Zipf-distributed ids, some missing
  M1, M2      multi-hot, 0 to 10 ids each
"""


def generate(spec: DemoLog, path: Path, *, progress: Progress | None = None) -> Path:
    """Writes the log to `path`, and a note to `_README_<stem>.txt` beside it, unless both are there already.

    Args:
        spec: what to generate.
        path: a Parquet file; it appears only when it is complete.
        progress: called with ("generate", rows written, all rows).

    Returns:
        `path`.

    Raises:
        UserError: when `path` holds anything but a demo log, or cannot be written.
    """
    try:
        current = _is_current(spec, path)
        note = path.with_name(f"_README_{path.stem}.txt")  # readers of a folder skip names with an underscore
        if not current:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(spec, path, progress or (lambda stage, rows_done, total: None))
        if not current or not note.exists():
            note.write_text(_note(spec, path.name), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: the demo log cannot be written ({error}). Name a file in a folder of yours."
        ) from None
    return path


def _is_current(spec: DemoLog, path: Path) -> bool:
    """Tells whether the very log is there already; a log of other settings may be replaced, a foreign file not."""
    if not path.exists():
        return False
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        metadata = {}
    if _KEY not in metadata:
        raise UserError(
            f"{path} exists and is no demo log, so it is left alone. Name another file, or remove this one."
        )
    return bool(metadata[_KEY] == _settings(spec).encode())


def _settings(spec: DemoLog) -> str:
    """Returns the settings as JSON; those that came later only where they are given, so that a log of the earlier
    ones is to the byte what it was before."""
    later = spec.model_dump(mode="json", exclude_defaults=True)
    settings = spec.model_dump(mode="json", include=_PLAIN) | later
    return json.dumps({"generator": _GENERATOR, **settings}, sort_keys=True)


def _note(spec: DemoLog, name: str) -> str:
    settings = json.dumps(json.loads(_settings(spec)), indent=2)
    visits = "".join(f"  {population.name:<12}{population.described}\n" for population in populations(spec))
    context = "" if spec.visits_alone else _CONTEXT.format(most_ids=spec.most_ids or 100_000)
    return _NOTE.format(name=name, oracle=ORACLE, settings=settings, visits=visits, context=context)


def _write_whole(spec: DemoLog, path: Path, progress: Progress) -> None:
    with (
        atomic_file(path) as unfinished,
        pq.ParquetWriter(unfinished, _schema(spec), compression="zstd") as writer,
    ):
        rows_done = 0
        for table in groups(spec):
            writer.write_table(table)
            rows_done += len(table)
            progress("generate", rows_done, spec.rows)


def _schema(spec: DemoLog) -> pa.Schema:
    fields = {"label": pa.int8(), "timestamp": pa.timestamp("ms")}
    if not spec.visits_alone:
        fields |= {column.name: pa.int64() for column in COUNTS} | {COUNTER: pa.int64()}
        fields |= {column.name: pa.string() for column in CATEGORICAL}
        fields |= {column.name: pa.list_(pa.string()) for column in MULTI_HOT}
    fields |= {population.name: pa.string() for population in populations(spec)}
    fields |= {ORACLE: pa.float64()}
    notice = "Generated by dhen-search from a known teacher: not a real click log."
    return pa.schema(fields, metadata={_KEY: _settings(spec), b"description": notice})


def groups(spec: DemoLog) -> Iterator[pa.Table]:
    """Yields the log's rows, a group at a time."""
    teacher = Teacher.draw(spec)
    schema = _schema(spec)
    for group, first_row in enumerate(range(0, spec.rows, _GROUP)):
        rng = np.random.default_rng([spec.seed, 2, group])
        row_B = np.arange(first_row, min(first_row + _GROUP, spec.rows))
        position_B = (row_B + rng.random(len(row_B))) / spec.rows
        examples = draw_examples(rng, teacher.drift, spec.base_rate, position_B)
        examples = with_visits(spec, examples, 2, group)
        oracle_B = probability(teacher.logit(examples))
        label_B = rng.random(len(row_B)) < oracle_B
        yield pa.table(_columns(spec, examples, label_B, oracle_B), schema=schema)


def _columns(spec: DemoLog, examples: Examples, label_B: np.ndarray, oracle_B: Floats) -> dict[str, pa.Array]:
    columns = {
        "label": pa.array(label_B.astype(np.int8)),
        "timestamp": pa.array(START + examples.seconds_B.astype("timedelta64[s]")),
        ORACLE: pa.array(oracle_B),
    }
    for population in populations(spec):  # too many to keep the texts of all
        columns[population.name] = pa.array(_hex_texts(population.name, examples.ids[population.name]))
    return columns if spec.visits_alone else columns | _context(examples, spec.most_ids)


def _context(examples: Examples, most_ids: int | None) -> dict[str, pa.Array]:
    """Returns all inputs but users and items."""
    columns = {
        name: pa.array(values_B, mask=values_B == MISSING) for name, values_B in examples.counts.items()
    }
    for column in CATEGORICAL:
        columns[column.name] = _texts(column, examples.ids[column.name], most_ids)
    for column in MULTI_HOT:
        ids, offsets = examples.bags[column.name]
        columns[column.name] = pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), _texts(column, ids, most_ids)
        )
    return columns


def _texts(column: IdColumn, ids: Ints, most_ids: int | None) -> pa.Array:
    if most_ids is not None:
        ids = np.minimum(ids, most_ids - 1)  # missing ones are below 0
    return _names(column).take(pa.array(ids, mask=ids == MISSING))


@cache
def _names(column: IdColumn) -> pa.Array:
    return pa.array(_hex_texts(column.name, np.arange(column.cardinality)))


def _hex_texts(name: str, ids: Ints) -> list[str]:
    """Returns the text of each id: eight hex digits that say nothing of its popularity."""
    code = ids.astype(np.uint64) * 2_654_435_761 + zlib.crc32(name.encode())
    return [f"{number:08x}" for number in (code % 2**32).tolist()]  # an odd multiplier: all distinct
