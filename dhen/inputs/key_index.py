"""Finds the rows of 64-bit keys: an open-addressing hash table in tensors, looked up for many keys at once.

A key's home is a bucket of four places, one cache line's half, in which it is compared with all four together;
a key whose bucket is full lies in the next one that is not. Keys are hashes already, so their own bits say which
bucket is theirs. The table doubles when it is half full. Removed keys leave a mark, so that keys behind them are
still found, until the table is built anew.

Shapes: N keys, P keys that are still being looked for, W places of a bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
            self._rebuild(len(key_N))
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

    def _rebuild(self, more: int) -> None:
        """Makes the table anew, without marks, at most a quarter full once so many keys more are in it."""
        flat = self._keys.view(-1)
        held = ((flat != EMPTY) & (flat != REMOVED)).nonzero().squeeze(1)
        key_N, row_N = flat[held], self._rows[held]
        self._taken = len(held)
        self._make(max(SMALLEST, 1 << (4 * (len(held) + more) - 1).bit_length()))
        self._put(key_N, row_N)

    def _home(self, key_N: Tensor) -> Tensor:
        return (key_N ^ (key_N >> 32)) & self._mask

    def _places(self, key_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where keys lie (N), and whether they do; a place means nothing where they do not."""
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
        """Returns the places of keys in their buckets, whether they are there, and whether to look further: where
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
