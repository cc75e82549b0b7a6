"""Writes the cache of a staged log: encodes batch by batch and deals the rows out to their splits."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pyarrow as pa

from trials.data.encoding.encoding import Encoding
from trials.data.log_schema import SPLITS
from trials.data.prepare.fit import split_of
from trials.data.prepare.npy import NpyWriter
from trials.data.prepare.splits import SplitPlan
from trials.data.prepare.staging import Progress, Staged
from trials.data.raw.labels import PAIR
from trials.data.rows import EncodedRows


class _SplitWriter:
    """The growing files of one split."""

    def __init__(self, directory: Path, encoding: Encoding) -> None:
        directory.mkdir()
        schema, features = encoding.schema, encoding.features
        self._labels = NpyWriter(directory / "labels.npy", np.float32)
        growing = len(features.growing_columns)
        widths = {
            "categorical": (np.int32, len(features.categorical)),
            "numeric": (np.float32, len(features.numeric)),
            **({"share": (np.float32, len(features.bucketed))} if features.bucketed else {}),
            **({"keys": (np.int64, growing)} if growing else {}),
        }
        self._inputs = {
            name: NpyWriter(directory / f"{name}.npy", dtype, (width,))
            for name, (dtype, width) in widths.items()
        }
        self._bags = [
            (
                NpyWriter(directory / f"bag{i}_ids.npy", np.int64 if table.growing else np.int32),
                NpyWriter(directory / f"bag{i}_offsets.npy", np.int64),
            )
            for i, table in enumerate(features.multi_hot)
        ]
        for _, offsets in self._bags:
            offsets.append(np.zeros(1, dtype=np.int64))
        kept = (
            ("weight", schema.batch_weight, np.float32),
            ("oracle", schema.oracle, np.float64),
            ("timestamp", schema.timestamp, np.int64),
            ("pair", PAIR if schema.pairs else None, np.bool_),
        )
        self._extra = {
            name: NpyWriter(directory / f"{file}.npy", dtype)
            for file, name, dtype in kept
            if name is not None
        }
        self._label = schema.label

    def append(self, inputs: EncodedRows, columns: Mapping[str, pa.Array]) -> None:
        self._labels.append(columns[self._label].to_numpy())
        for name, file in self._inputs.items():
            file.append(getattr(inputs, name))
        for (ids, offsets), bags in zip(self._bags, inputs.bags, strict=True):
            offsets.append(bags.offsets[1:] + ids.rows)
            ids.append(bags.ids)
        for name, file in self._extra.items():
            file.append(columns[name].to_numpy())

    def close(self) -> None:
        pairs = [file for pair in self._bags for file in pair]
        for file in (self._labels, *self._inputs.values(), *pairs, *self._extra.values()):
            file.close()


def write_splits(
    staged: Staged, plan: SplitPlan, encoding: Encoding, directory: Path, pool: Executor, progress: Progress
) -> None:
    """Writes the three splits below a directory."""
    rows_done = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(_SplitWriter(directory / name, encoding))) for name in SPLITS]
        for file, first_open, batch in staged.batches():
            split = split_of(plan, encoding.schema, file, first_open, batch)
            inputs = encoding.encode(_columns(batch), pool)
            for i in np.unique(split):
                rows = np.flatnonzero(split == i)
                if len(rows) == batch.num_rows:
                    writers[i].append(inputs, _columns(batch))
                else:
                    writers[i].append(inputs.take(rows), _columns(batch.take(pa.array(rows))))
            rows_done += batch.num_rows
            progress("writing", rows_done, staged.rows)


def _columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))
