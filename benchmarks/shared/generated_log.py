"""Generated click logs for the benchmarks: categorical columns, Zipf-like ids, labels of a logistic teacher.

The log odds are a sum of one number for each id and of products of the ids' short vectors in neighbouring
columns, so that a model which crosses columns has something to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trials.data.log_schema import CategoricalColumn, Column, LabelColumn, LogSchema, SplitRule
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog

TEN_COLUMNS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 100_000)
"""Distinct ids of each column of the usual log."""
CHUNK_ROWS = 100_000
BIAS = -1.5
TEACHER_IDS, TEACHER_DIM = 10_000, 4
"""Ids of a column share effects beyond so many of them; length of the vectors."""

Ids = NDArray[np.int32]


class _Teacher:
    """Effects of ids and of pairs of ids."""

    def __init__(self, columns: Sequence[int], rng: np.random.Generator) -> None:
        known = [min(count, TEACHER_IDS) for count in columns]
        scale = 1 / np.sqrt(len(columns))
        self._single = [rng.normal(0, 1.2 * scale, n) for n in known]
        self._vectors = [rng.normal(0, 1, (n, TEACHER_DIM)).astype(np.float32) for n in known]
        self._pair_scale = 1.2 * scale / np.sqrt(TEACHER_DIM)

    def log_odds(self, ids: list[Ids]) -> NDArray[np.float64]:
        """One a row."""
        total = np.full(len(ids[0]), BIAS)
        before = None
        for column, effect, vectors in zip(ids, self._single, self._vectors, strict=True):
            known = column % TEACHER_IDS
            total += effect[known]
            now = vectors[known]
            if before is not None:
                total += self._pair_scale * np.einsum("nd,nd->n", before, now)
            before = now
        return total


def write_log(path: Path, rows: int, columns: Sequence[int], *, seed: int = 0, uniform: bool = False) -> None:
    """Writes a Parquet file with `label` and c0, c1 ..., a chunk at a time.

    Args:
        path: of the file.
        rows: examples.
        columns: distinct ids of each column.
        seed: of the teacher and the rows.
        uniform: draw ids evenly in place of Zipf-like.
    """
    rng = np.random.default_rng(seed)
    teacher = _Teacher(columns, rng)
    schema = pa.schema(
        [("label", pa.int8()), *((f"c{i}", pa.int32()) for i in range(len(columns)))],
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, CHUNK_ROWS):
            n = min(CHUNK_ROWS, rows - first)
            ids = [_draw(rng, n, count, uniform) for count in columns]
            label = rng.random(n) < 1 / (1 + np.exp(-teacher.log_odds(ids)))
            writer.write_table(pa.table([label.astype(np.int8), *ids], schema=schema))


def _draw(rng: np.random.Generator, rows: int, count: int, uniform: bool) -> Ids:
    u = rng.random(rows)
    return (u * count if uniform else count**u - 1).astype(np.int32)


def generated_log(
    folder: Path,
    rows: int,
    columns: Sequence[int] = TEN_COLUMNS,
    *,
    buckets: bool = False,
    uniform: bool = False,
    held_out: float = 0.1,
    order: Sequence[int] | None = None,
) -> PreparedLog:
    """A generated log, prepared in a new folder.

    Args:
        folder: where it goes.
        rows: examples, of which `held_out` are validation and as many test.
        columns: distinct ids of each column.
        buckets: tables have exactly as many rows as there are distinct ids, seen in the log or not.
        uniform: draw ids evenly in place of Zipf-like.
        held_out: fraction.
        order: of the columns in the prepared log; as they are written if there is none.
    """
    folder.mkdir(parents=True)
    path = folder / "log.parquet"
    write_log(path, rows, columns, uniform=uniform)
    roles: dict[str, Column] = {"label": LabelColumn()}
    for i in range(len(columns)) if order is None else order:
        roles[f"c{i}"] = CategoricalColumn(hash_buckets=columns[i] if buckets else None)
    schema = LogSchema(columns=roles, split=SplitRule(validation=held_out, test=held_out))
    log = prepare([path], out=folder / "prepared", schema=schema)
    path.unlink()
    return log


def write_low_rank_log(
    path: Path, rows: int, *, users: int = 24, items: int = 20, rank: int = 8, seed: int = 0
) -> None:
    """Writes a Parquet file with `label`, `user`, `item` and the number `n0`: who clicks what follows from the dot
    product of a vector of the user and one of the item, of which many lengths of embeddings are too short."""
    rng = np.random.default_rng(seed)
    user_UR, item_IR = rng.normal(size=(users, rank)), rng.normal(size=(items, rank))
    user, item, number = rng.integers(users, size=rows), rng.integers(items, size=rows), rng.normal(size=rows)
    affinity = (user_UR[user] * item_IR[item]).sum(axis=1) / np.sqrt(rank)
    clicked = rng.random(rows) < 1 / (1 + np.exp(1 - 2 * affinity - 0.3 * number))
    columns = {"label": clicked.astype(np.int8), "user": user, "item": item, "n0": number}
    # ids are text, or a reader could take them for numbers
    texts = {name: pa.array([f"{name}{i}" for i in columns[name]]) for name in ("user", "item")}
    pq.write_table(pa.table(columns | texts), path)
