"""Writes a demo log as CSV or TSV, as a log of one's own would come: lists are texts with a bar between ids."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.data.demo.spec import DemoLog
from trials.data.demo.write import groups
from trials.data.prepare.staging import Progress

DELIMITERS = {".csv": ",", ".tsv": "\t", ".csv.gz": ",", ".tsv.gz": "\t"}
"""Endings of the names of files that are written as text, each with what stands between its columns."""


def write_text(spec: DemoLog, path: Path, *, progress: Progress) -> None:
    """Writes the log to `path`, gzipped where the name ends in `.gz`; the file appears only when it is complete.

    Args:
        spec: what to generate.
        path: a file with one of the endings of `DELIMITERS`, which does not exist yet.
        progress: called with ("generate", rows written, all rows).

    Raises:
        UserError: when there is something at `path`; a text says nothing of where it came from, so no file is
            replaced.
    """
    if path.exists():
        raise UserError(f"{path} exists, so it is left alone. Name another file, or remove this one.")
    delimiter = next(mark for ending, mark in DELIMITERS.items() if path.name.endswith(ending))
    options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="none")  # no text holds a delimiter
    path.parent.mkdir(parents=True, exist_ok=True)
    compression = "gzip" if path.suffix == ".gz" else None
    with atomic_file(path) as unfinished, pa.output_stream(unfinished, compression=compression) as stream:
        rows_done = 0
        writer = None
        for group in groups(spec):
            table = _as_text(group)
            writer = writer or pa.csv.CSVWriter(stream, table.schema, write_options=options)
            writer.write_table(table)
            rows_done += len(table)
            progress("generate", rows_done, spec.rows)
        assert writer is not None, "a log has a row at least"
        writer.close()


def _as_text(group: pa.Table) -> pa.Table:
    """Returns the rows with time stamps and lists as texts; numbers write themselves."""
    for position, field in enumerate(group.schema):
        column = group[position]
        if pa.types.is_timestamp(field.type):
            text = pc.strftime(column.cast(pa.timestamp("s")), format="%Y-%m-%d %H:%M:%S")
        elif pa.types.is_list(field.type):
            text = pa.chunked_array([pc.binary_join(chunk, "|") for chunk in column.chunks])
        else:
            continue
        group = group.set_column(position, field.name, text)
    return group
