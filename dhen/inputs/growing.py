"""Growing tables while they are read: which row each id has, and the default row for ids that have none.

The ids of such a table are 64-bit hashes of the log's values, its keys (`dhen.batch.Keys`). Which key has which
row is part of the weights. Rows are given to keys, and taken back, by whoever trains
(`trials.embeddings.growing`). Everything here lies in host memory, on whatever device the model is.

Shapes: B examples, T categorical tables, G growing ones among them, K numeric inputs, N keys of a batch (those of
columns, example by example, then those of bags), R rows of all growing tables together, the default rows apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from dhen.batch import FeatureBatch, Keys
from dhen.inputs.key_index import EMPTY, KeyIndex
from dhen.schema import FeatureSchema


class GrowingRows(nn.Module):
    """The rows of all growing tables of a schema, numbered on from 1 over all of them; 0 is any default row."""

    keys: Tensor
    """int64 (1 + R): the key that each row belongs to, as `salted` has it, 0 where the row is free; the first
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
        self._salts = [_salt(table.name) for table in self.tables]
        self._salt_G = torch.tensor(self._salts[: len(columns)], dtype=torch.int64)
        self.register_buffer("keys", torch.zeros(1 + self.starts[-1], dtype=torch.int64))
        self.index = KeyIndex()
        self.register_load_state_dict_post_hook(_build_index)  # type: ignore[no-untyped-call]

    def forward(self, batch: FeatureBatch) -> FeatureBatch:
        """Returns a batch with rows in place of keys: those that the keys have, else the default row."""
        assert batch.keys is not None
        return self.with_rows(batch, self.index.find(self.salted(batch.keys)))

    def build_index(self) -> None:
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


def _build_index(module: GrowingRows, _: object) -> None:
    module.build_index()


def _salt(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def _salted(keys: Tensor, salt: Tensor | int) -> Tensor:
    return torch.where(keys == EMPTY, EMPTY, keys ^ salt)


def _within(rows: Tensor, start: Tensor | int) -> Tensor:
    """Returns rows as their table counts them, the default row as 0."""
    return (rows - start).clamp_(min=0)
