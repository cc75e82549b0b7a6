"""Typed batches on disk: a log is parsed once, and read from here as often as a step needs.

One uncompressed Arrow stream; memory holds a batch of it at a time. (A memory map would be faster by
little, and its touched pages would count as this process's memory.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from dhen.errors import UserError
from trials.data.log_schema import LogSchema
from trials.data.prepare.splits import OPEN, RowOrder, StampCounts, check_names, named_splits
from trials.data.raw.columns import numbers_of
from trials.data.raw.files import RawLog
from trials.data.raw.readers import BadRows, read_batches
from trials.data.raw.sources import estimate_rows
from trials.data.raw.typed import LabelReader, columns_of, type_labelled

Progress = Callable[[str, int, int | None], None]
"""A function that is called with a step's name, rows done, and about how many there are (None if unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLog:
    """A log, typed, on disk, and what was learnt while it was read."""

    path: Path
    rows: int
    files: tuple[str, ...]
    """Name of the file that each batch is from."""
    open_rows: tuple[int, ...]
    """Number of rows of each batch that no list of the split rule names, so that a fraction decides."""
    stamps: StampCounts | None
    """Number of open rows of each time stamp, if the log has time stamps."""
    row_order: RowOrder
    """What the order of the open rows shows, if the split depends on it."""

    @property
    def first_of_file(self) -> dict[str, int]:
        """Number of open rows before each file's, by its name."""
        first, before = dict[str, int](), 0
        for name, open_rows in zip(self.files, self.open_rows, strict=True):
            first.setdefault(name, before)
            before += open_rows
        return first

    def batches(self) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """Yields each batch with its file's name and the number of open rows before it."""
        first_open = 0
        with pa.OSFile(str(self.path)) as file, pa.ipc.open_stream(file) as stream:
            for name, open_rows, batch in zip(self.files, self.open_rows, stream, strict=True):
                yield name, first_open, batch
                first_open += open_rows


def stage(
    log: RawLog, schema: LogSchema, path: Path, *, bad_rows: BadRows, pool: Executor, progress: Progress
) -> StagedLog:
    """Parses the log and writes it typed.

    Raises:
        UserError: for whatever makes a row unusable, for missing labels, for a log of one class or no rows, for
            a split rule that lists what the log has not.
    """
    if schema.split_column is None:  # before hours are spent on reading
        check_names(schema.split, [file.name for file in log.files], None, ())
    labels = LabelReader(schema.label, schema.label_column, log.describe())
    stamps = StampCounts() if schema.timestamp else None
    row_order = RowOrder(schema)
    files: list[str] = []
    open_rows: list[int] = []
    split_values: set[str] = set()
    rows, read, expected = 0, 0, estimate_rows(log)
    writer: pa.RecordBatchStreamWriter | None = None
    try:
        for raw in read_batches(log, schema.used, bad_rows, schema.marks):
            batch = type_labelled(raw, schema, labels, bad_rows, pool)
            writer = writer or pa.ipc.new_stream(str(path), batch.schema)
            writer.write_batch(batch)
            assert raw.source is not None
            files.append(raw.source.name)
            values = batch.column(schema.split_column) if schema.split_column else None
            if values is not None:
                split_values.update(values.dictionary.to_pylist())
            is_open = named_splits(schema.split, files[-1], batch.num_rows, values) == OPEN
            open_rows.append(int(is_open.sum()))
            if stamps and schema.timestamp:
                counted = is_open if schema.split.by in ("timestamp", "auto") else None
                stamps.add(batch.column(schema.timestamp).to_numpy(), counted)
            if schema.split.by == "auto":
                opened = batch if is_open.all() else batch.filter(pa.array(is_open))
                columns = columns_of(opened)
                label = columns[schema.label].to_numpy()
                if schema.pairs:  # the shares themselves, of which the typed columns have the parts
                    shares = filter(None, (schema.label, schema.weight))
                    columns |= {name: pa.array(numbers_of(raw.table.column(name))[0]) for name in shares}
                row_order.add(columns, label)
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
    if schema.split_column is not None:
        check_names(schema.split, (), schema.split_column, split_values)
    return StagedLog(
        path=path,
        rows=rows,
        files=tuple(files),
        open_rows=tuple(open_rows),
        stamps=stamps,
        row_order=row_order,
    )


# A .npy file that grows: rows are appended in order, their number is written at the end.


class NpyWriter:
    """Writes one array, rows at a time.

    Plain writes and no memory map, because a full disk then raises an error instead of killing the process.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._file = path.open("wb")
        self.rows = 0
        self._write_header()

    def _write_header(self) -> None:
        """Writes a header of the same length for any number of rows: numpy leaves room for the first axis to
        grow."""
        shape = (self.rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, rows: NDArray[np.generic]) -> None:
        """Adds rows (n x row_shape)."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Writes the number of rows and closes the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()
