"""Fresh rows of embedding tables: all of a matrix, some of it for a process that holds a part, or none at all.

Which rows are made is the caller's context (`part_of_tables`, `unfilled_tables`), as models are built by functions
that need not know of it. Whatever is built after the tables has the same weights in all contexts but the last.

Shapes: R rows of a matrix or of a block of it, D columns, P of the rows that are kept, Q of a block's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhen.schema import Table

EMBEDDING_INIT_STD = 0.05
"""Standard deviation of fresh embeddings; small beside the layers' unit-variance outputs."""
BLOCK_ROWS = 1 << 16
"""Rows that are drawn at a time where few of them are kept: a multiple of 16, see `_drawn`."""


class _Part(NamedTuple):
    """Rows `first`, `first` + `step`, ... of a matrix; none where `first` is None."""

    first: int | None
    step: int


_PART: ContextVar[_Part | None] = ContextVar("part", default=None)
_UNFILLED: ContextVar[bool] = ContextVar("unfilled", default=False)


@contextlib.contextmanager
def part_of_tables(first: int | None, step: int = 1) -> Iterator[None]:
    """A context in which tables are built with some rows of each matrix alone, and memory for these: rows `first`,
    `first` + `step` and so on, or none where `first` is None.

    They have the weights that they have among all, as all are drawn, a block at a time. Such tables are for
    whoever takes their weights; they cannot be looked up.
    """
    token = _PART.set(_Part(first, step))
    try:
        yield
    finally:
        _PART.reset(token)


@contextlib.contextmanager
def unfilled_tables() -> Iterator[None]:
    """A context in which tables are built without memory for their rows, which a file's take the place of
    (`load_state_dict(..., assign=True)`)."""
    token = _UNFILLED.set(True)
    try:
        yield
    finally:
        _UNFILLED.reset(token)


def fresh_rows(tables: Sequence[Table], starts: Sequence[int], dim: int) -> Tensor:
    """Returns fresh weights of tables that lie in one matrix (R, D), or what the context has of them.

    Rows of growing tables are zero until an id has them; few systems give them memory before.

    Args:
        tables: the tables, in order.
        starts: the first row of each, and at the end the number of all.
        dim: D.
    """
    total = starts[-1]
    if _UNFILLED.get():
        return torch.empty(total, dim, device="meta")
    # one draw for all where none grows: a seed stands for the same weights as it did before tables could grow
    spans = [(0, total)]
    if any(table.growing for table in tables):
        spans = [
            (start, 1 if table.growing else table.rows) for table, start in zip(tables, starts, strict=False)
        ]
    part = _PART.get()
    if part is not None:
        return _some_rows(spans, total, dim, part)
    drawn = sum(rows for _, rows in spans)
    weight_RD = torch.empty(total, dim) if drawn == total else torch.zeros(total, dim)
    for start, rows in spans:
        _draw(weight_RD[start : start + rows])
    return weight_RD


def _some_rows(spans: Sequence[tuple[int, int]], total: int, dim: int, part: _Part) -> Tensor:
    """Returns some rows of a matrix (P, D), of which all in these spans (first row, number) are drawn."""
    first = total if part.first is None else part.first
    kept_PD = torch.zeros(len(range(first, total, part.step)), dim)
    for start, rows in spans:
        for block_RD in _drawn(rows, dim):
            skipped = max(first - start, (first - start) % part.step)
            chosen_QD = block_RD[skipped :: part.step]
            place = (start + skipped - first) // part.step
            kept_PD[place : place + len(chosen_QD)] = chosen_QD
            start += len(block_RD)
    return kept_PD


def _drawn(rows: int, dim: int) -> Iterator[Tensor]:
    """Yields fresh rows a block at a time, the same as from one draw: torch takes 16 numbers at a time from the
    generator, and where the last are fewer, the last 16 once more."""
    while rows:
        block = rows if rows < 2 * BLOCK_ROWS else BLOCK_ROWS
        yield _draw(torch.empty(block, dim))
        rows -= block


def _draw(weight_RD: Tensor) -> Tensor:
    return nn.init.normal_(weight_RD, std=EMBEDDING_INIT_STD)
