"""The short way from raw files straight to a model's inputs, for scoring. Needs no label and no cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from dhen.errors import UserError
from trials.data.encoding import EncodedRows, Encoding
from trials.data.raw.readers import BadRows, RawBatch, read_batches
from trials.data.raw.sources import open_log
from trials.data.raw.typed import typed_columns
from trials.data.read_options import READ_AS_FOUND, ReadOptions

T = TypeVar("T")


def encode_rows(
    sources: Sequence[Path],
    encoding: Encoding,
    *,
    options: ReadOptions = READ_AS_FOUND,
    batch_size: int = 65_536,
) -> Iterator[EncodedRows]:
    """Encodes the rows of raw files, in their order, at most `batch_size` at a time.

    Columns that are no input are ignored. No row is ever left out, so that scores keep their row's number.

    Raises:
        UserError: when the files lack an input column (all are listed), or for a row that cannot be read.
    """
    log = open_log(sources, options.format, options.csv, encoding.schema.csv)
    inputs = encoding.schema.inputs
    absent = [name for name in inputs if name not in log.columns]
    if absent:
        raise UserError(
            f"{log.describe()}: the columns {', '.join(map(repr, absent))} are missing, which the model "
            f"needs; the log has {', '.join(log.columns)}."
        )

    def encoded() -> Iterator[EncodedRows]:  # the files are checked at once, and read when rows are asked for
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for batch in read_batches(log, inputs, BadRows(skip=False), encoding.schema.marks):
                rows = _encode(batch, encoding, pool)
                for start in range(0, rows.rows, batch_size):
                    yield rows.slice(start, min(start + batch_size, rows.rows))

    return encoded()


def transform(table: pa.RecordBatch, encoding: Encoding) -> EncodedRows:
    """Encodes a batch of raw columns, text or typed.

    Raises:
        UserError: when an input column is missing, or for a value that its role does not allow.
    """
    absent = [name for name in encoding.schema.inputs if name not in table.schema.names]
    if absent:
        raise UserError(f"the columns {', '.join(map(repr, absent))} are missing, which the model needs.")
    return _encode(RawBatch(table=table), encoding, _InThisThread())


class _InThisThread(Executor):
    """What is submitted runs at once: handing a request's columns to another thread takes longer than they do."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _encode(batch: RawBatch, encoding: Encoding, pool: Executor) -> EncodedRows:
    columns = typed_columns(batch, encoding.schema, encoding.schema.inputs, BadRows(skip=False), pool)
    return encoding.encode(columns, pool)
