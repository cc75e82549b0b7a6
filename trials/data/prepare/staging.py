"""Typed batches on disk: a log is parsed once, and read from here as often as a step needs.

One uncompressed Arrow stream; memory holds a batch of it at a time. (A memory map would be faster by
little, and its touched pages would count as this process's memory.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dhen.errors import UserError
from trials.data.log_schema import LabelColumn, LogSchema
from trials.data.prepare.splits import StampCounts
from trials.data.raw.files import RawLog
from trials.data.raw.labels import LabelReader
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.sources import estimate_rows
from trials.data.raw.typed import type_labelled

Progress = Callable[[str, int, int | None], None]
"""A function that is called with a step's name, rows done, and about how many there are (None where unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A log, typed, on disk, and what was learnt while it was read."""

    path: Path
    rows: int
    files: tuple[str, ...]
    """Name of the file that each batch is from."""
    stamps: StampCounts | None
    """Number of rows of each time stamp, if the log has time stamps."""

    def batches(self) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """Yields each batch with its file's name and the position of its first row in the log."""
        first_row = 0
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            for name, batch in zip(self.files, stream, strict=True):
                yield name, first_row, batch
                first_row += batch.num_rows


def stage(
    log: RawLog,
    schema: LogSchema,
    path: Path,
    *,
    bad_rows: BadRows,
    pool: Executor,
    progress: Progress,
) -> Staged:
    """Parses the log and writes it typed.

    Raises:
        UserError: for whatever makes a row unusable, for missing labels, for a log of one class or no rows.
    """
    column = schema.columns[schema.label]
    assert isinstance(column, LabelColumn)
    labels = LabelReader(schema.label, column.positive, log.describe())
    stamps = StampCounts() if schema.timestamp else None
    files: list[str] = []
    rows, read, expected = 0, 0, estimate_rows(log)
    writer: pa.RecordBatchStreamWriter | None = None
    try:
        for raw in read_batches(log, schema.used, bad_rows):
            batch = type_labelled(raw, schema, labels, bad_rows, pool)
            writer = writer or pa.ipc.new_stream(str(path), batch.schema)
            writer.write_batch(batch)
            if stamps and schema.timestamp:
                stamps.add(batch.column(schema.timestamp).to_numpy())
            assert raw.source is not None
            files.append(raw.source.path.name)
            rows, read = rows + batch.num_rows, read + raw.table.num_rows
            progress("reading", read, max(expected, read))
    finally:
        if writer:
            writer.close()
    if not rows:
        raise UserError(
            f"{log.describe()}: the log holds no rows{' that can be used' if read else ', only a header'}."
        )
    labels.check(read, skipping=bad_rows.skip)
    return Staged(path=path, rows=rows, files=tuple(files), stamps=stamps)
