"""Growing tables while they are read: which row each id has, and the default row for ids that have none.

The ids of such a table are 64-bit hashes of the log's values, its keys (`dhen.batch.Keys`). Which key has
which row is part of the weights. Rows are given to keys, and taken back, by whoever trains
(`trials.training.embeddings.growing`). Everything here lies in host memory, on whatever device the model is.

Shapes: B examples, T categorical tables, G growing ones among them, K numeric inputs, N keys of a batch (those
of columns, example by example, then those of bags), R rows of all growing tables together, the default rows
apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch, Keys
from dhen.schema import FeatureSchema, Table

# Finds the rows of 64-bit keys: an open-addressing hash table in tensors, looked up for many keys at once.
#
# A key's home is a bucket of four places, one cache line's half, in which it is compared with all four together;
# a key whose bucket is full lies in the next one that is not. Keys are hashes already, so their own bits say
# which bucket is theirs. The table doubles when it is half full. Removed keys leave a mark, so that keys behind
# them are still found, until the table is built anew.
#
# Shapes: N keys, P keys that are still being looked for, W places of a bucket.

WIDTH = 4
"""Places of a bucket, W: four were as fast as any for 40,000 keys, and faster for 2,600 (docs/log.md)."""
EMPTY, REMOVED = 0, -1
"""Keys of a place that was never taken, and of one whose key is gone: row 0 is theirs. Missing values have the
first; an id with the second, one of 2^64, is taken for unknown."""
SMALLEST = 256
"""Places of an empty table."""


class KeyIndex:
    """Rows by key; row 0 stands for a key that is not there."""

    def __init__(self) -> None:
        self._taken = 0
        """Places that hold a key, or the mark of one."""
        self._lanes = torch.arange(WIDTH)
        self._make(SMALLEST)

    def find(self, key_N: Tensor) -> Tensor:
        """Returns row_N in int64, 0 for keys that are not there."""
        place_N, found_N = self._places(key_N)
        return torch.where(found_N, self._rows[place_N], 0)

    def add(self, key_N: Tensor, row_N: Tensor) -> None:
        """Adds keys, each once, which are not there yet."""
        if 2 * (self._taken + len(key_N)) > len(self._rows):
            # anew, without marks, at most a quarter full once these keys are in it
            flat = self._keys.view(-1)
            held = ((flat != EMPTY) & (flat != REMOVED)).nonzero().squeeze(1)
            held_keys, held_rows = flat[held], self._rows[held]
            self._taken = len(held)
            self._make(max(SMALLEST, 1 << (4 * (len(held) + len(key_N)) - 1).bit_length()))
            self._put(held_keys, held_rows)
        self._taken += len(key_N)
        self._put(key_N, row_N)

    def remove(self, key_N: Tensor) -> None:
        """Removes keys that are there."""
        place_N, _ = self._places(key_N)
        self._keys.view(-1)[place_N] = REMOVED
        self._rows[place_N] = 0

    def _make(self, places: int) -> None:
        self._keys = torch.zeros(places // WIDTH, WIDTH, dtype=torch.int64)
        self._rows = torch.zeros(places, dtype=torch.int64)
        self._mask = places // WIDTH - 1

    def _home(self, key_N: Tensor) -> Tensor:
        return (key_N ^ (key_N >> 32)) & self._mask

    def _places(self, key_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where keys lie (N), and whether they do; a place means nothing if they do not."""
        bucket_N = self._home(key_N)
        place_N, found_N, on_N = self._in_buckets(key_N, bucket_N)
        left_P = on_N.nonzero().squeeze(1)
        bucket_P = bucket_N[left_P]
        while len(left_P):
            bucket_P = (bucket_P + 1) & self._mask
            place_P, found_P, on_P = self._in_buckets(key_N[left_P], bucket_P)
            place_N[left_P], found_N[left_P] = place_P, found_P
            left_P, bucket_P = left_P[on_P], bucket_P[on_P]
        return place_N, found_N

    def _in_buckets(self, key_N: Tensor, bucket_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the places of keys in their buckets, whether they are there, and whether to look further: if
        they are not and the bucket is full."""
        held_NW = self._keys.index_select(0, bucket_N)
        lane_N = ((held_NW == key_N.unsqueeze(1)) * self._lanes).amax(dim=1)
        found_N = held_NW.gather(1, lane_N.unsqueeze(1)).squeeze(1) == key_N
        return bucket_N * WIDTH + lane_N, found_N, ~found_N & (held_NW[:, -1] != EMPTY)

    def _put(self, key_P: Tensor, row_P: Tensor) -> None:
        """Puts keys into the first free places from their homes on; of those that meet at a place one stays, and
        the others try again."""
        bucket_P, flat = self._home(key_P), self._keys.view(-1)
        while len(key_P):
            lane_P = (self._keys.index_select(0, bucket_P) != EMPTY).sum(dim=1)
            full_P = lane_P == WIDTH
            place_P = bucket_P * WIDTH + lane_P.clamp_(max=WIDTH - 1)
            free_P = (~full_P).nonzero().squeeze(1)
            flat[place_P[free_P]] = key_P[free_P]
            there_P = ~full_P & (flat[place_P] == key_P)
            self._rows[place_P[there_P]] = row_P[there_P]
            bucket_P = torch.where(full_P, (bucket_P + 1) & self._mask, bucket_P)
            key_P, row_P, bucket_P = key_P[~there_P], row_P[~there_P], bucket_P[~there_P]


class GrowingRows(nn.Module):
    """The rows of all growing tables of a schema, numbered on from 1 over all of them; 0 is any default row."""

    keys: Tensor
    """int64 (1 + R): the key that each row belongs to, as `salted` has it, 0 if the row is free; the first
    stands for default rows."""

    def __init__(self, schema: FeatureSchema) -> None:
        super().__init__()
        self.tables = schema.growing
        columns = self._columns = list(schema.growing_columns)
        self._bags = [place for place, table in enumerate(schema.multi_hot) if table.growing]
        capacities = [table.rows - 1 for table in self.tables]
        self.starts = tuple(itertools.accumulate(capacities, initial=0))
        """The numbers after which each table's rows begin, and at the end the number of all, R."""
        self.spans = tuple(slice(1 + start, 1 + stop) for start, stop in itertools.pairwise(self.starts))
        """Each table's rows among all."""
        self._start_G = torch.tensor(self.starts[: len(columns)])
        hashes = [hashlib.sha256(table.name.encode()).digest() for table in self.tables]
        self._salts = [int.from_bytes(each[:8], "little", signed=True) for each in hashes]
        self._salt_G = torch.tensor(self._salts[: len(columns)], dtype=torch.int64)
        self.register_buffer("keys", torch.zeros(1 + self.starts[-1], dtype=torch.int64))
        self.index = KeyIndex()
        self.register_load_state_dict_post_hook(GrowingRows.build_index)  # type: ignore[no-untyped-call]

    def forward(self, batch: FeatureBatch) -> FeatureBatch:
        """Returns a batch with rows in place of keys: those that the keys have, else the default row."""
        assert batch.keys is not None
        return self.with_rows(batch, self.index.find(self.salted(batch.keys)))

    def build_index(self, *_: object) -> None:
        """Makes the index of `keys` anew, after they were loaded."""
        self.index = KeyIndex()
        row_N = self.keys.nonzero().squeeze(1)
        self.index.add(self.keys[row_N], row_N)

    def held(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the keys that have a row of a table, as `Keys` has them, and their rows as the table counts
        them."""
        salted_R = self.keys[self.spans[number]]
        place_N = salted_R.nonzero().squeeze(1)
        return salted_R[place_N] ^ self._salts[number], place_N + 1

    def give(self, number: int, key_N: Tensor) -> None:
        """Gives the first rows of a table, which are free, to keys in their order; `build_index` is called after
        it."""
        start = self.spans[number].start
        self.keys[start : start + len(key_N)] = _salted(key_N, self._salts[number])

    def salted(self, keys: Keys) -> Tensor:
        """Returns key_N as the index has them: equal values of two tables differ. Missing ones stay 0."""
        bags = zip(keys.bags, self._salts[len(self._columns) :], strict=True)
        parts = [
            _salted(keys.columns_BG, self._salt_G).flatten(),
            *(_salted(bag, salt) for bag, salt in bags),
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def table_of(self, keys: Keys) -> Tensor:
        """Returns the number of the table of each key (N)."""
        examples, columns = keys.columns_BG.shape
        numbers = enumerate(keys.bags, start=columns)
        bags = [torch.full_like(bag, number) for number, bag in numbers]
        return torch.cat([torch.arange(columns).repeat(examples), *bags])

    def with_rows(self, batch: FeatureBatch, row_N: Tensor) -> FeatureBatch:
        """Returns a batch with the rows that its keys have been given, each counted within its own table."""
        assert batch.keys is not None
        columns_BG, bags = batch.keys
        sizes = [columns_BG.numel(), *(len(bag) for bag in bags)]
        of_columns, *of_bags = torch.split(row_N, sizes)
        ids_BT, all_bags = batch.ids_BT, list(batch.bags)
        if self._columns:
            row_BG = _within(of_columns.view_as(columns_BG), self._start_G)
            ids_BT = ids_BT.clone()
            ids_BT[:, self._columns] = row_BG.to(ids_BT)
        for place, rows, start in zip(self._bags, of_bags, self.starts[len(self._columns) :], strict=False):
            ids, offsets_B = all_bags[place]
            all_bags[place] = _within(rows, start).to(ids), offsets_B
        return dataclasses.replace(batch, ids_BT=ids_BT, bags=tuple(all_bags), keys=None)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Stays in host memory, and of its types, wherever the model goes."""
        return self


def _salted(keys: Tensor, salt: Tensor | int) -> Tensor:
    return torch.where(keys == EMPTY, EMPTY, keys ^ salt)


def _within(rows: Tensor, start: Tensor | int) -> Tensor:
    """Returns rows as their table counts them, the default row as 0."""
    return (rows - start).clamp_(min=0)


# Fresh rows of embedding tables: all of a matrix, some of it for a process that holds a part, or none at all.
#
# Which rows are made is the caller's context (`part_of_tables`, `unfilled_tables`), as models are built by
# functions that need not know of it. Whatever is built after the tables has the same weights in all contexts but
# the last.
#
# Shapes: R rows of a matrix or of a block of it, D columns, P of the rows that are kept, Q of a block's.

EMBEDDING_INIT_STD = 0.05
"""Standard deviation of fresh embeddings; small beside the layers' unit-variance outputs."""
BLOCK_ROWS = 1 << 16
"""Rows that are drawn at a time if few of them are kept: a multiple of 16, see `_drawn`."""


class _Part(NamedTuple):
    """Rows `first`, `first` + `step`, ... of a matrix; none if `first` is None."""

    first: int | None
    step: int


_PART: ContextVar[_Part | None] = ContextVar("part", default=None)
_UNFILLED: ContextVar[bool] = ContextVar("unfilled", default=False)


@contextlib.contextmanager
def part_of_tables(first: int | None, step: int = 1) -> Iterator[None]:
    """A context in which tables are built with some rows of each matrix alone, and memory for these: rows `first`,
    `first` + `step` and so on, or none if `first` is None.

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
    # one draw for all if none grows: a seed stands for the same weights as it did before tables could grow
    spans = [(0, total)]
    if any(table.growing for table in tables):
        spans = [
            (start, 1 if table.growing else table.rows) for table, start in zip(tables, starts, strict=False)
        ]
    part = _PART.get()
    if part is not None:
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
    drawn = sum(rows for _, rows in spans)
    weight_RD = torch.empty(total, dim) if drawn == total else torch.zeros(total, dim)
    for start, rows in spans:
        _draw(weight_RD[start : start + rows])
    return weight_RD


def _drawn(rows: int, dim: int) -> Iterator[Tensor]:
    """Yields fresh rows a block at a time, the same as from one draw: torch takes 16 numbers at a time from the
    generator, and if the last are fewer, the last 16 once more."""
    while rows:
        block = rows if rows < 2 * BLOCK_ROWS else BLOCK_ROWS
        yield _draw(torch.empty(block, dim))
        rows -= block


def _draw(weight_RD: Tensor) -> Tensor:
    return nn.init.normal_(weight_RD, std=EMBEDDING_INIT_STD)
