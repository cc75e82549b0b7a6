"""How many values of a growing table share their 64-bit hash with another value, counted in bounded memory.

Values are told apart by a second hash, modulo a prime, so that nothing is kept of them but two numbers. Of at most
`MOST` values: where there are more, of those whose hashes are in the lower half of all, then in the lower quarter,
and so on. Two values that share a hash are counted both or neither, so what is found is that of a known share.

Shapes: N values, K values that are kept.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trials.data.encoding.hashing import Hashes, hash64, second_hash

MOST = 1 << 17
"""Number of values of a column that are kept: sixteen bytes each, and a few times that while they are sorted. With
more, looking for those that are known takes longer than hashing."""


class HashCollisions:
    """Counts the hashes of a column that stand for several values, batch by batch."""

    def __init__(self, most: int = MOST) -> None:
        """`most`: number of values that are kept."""
        self._most, self._halvings = most, 0
        self._hash_K = self._second_K = np.empty(0, dtype=np.uint64)
        """Both hashes of each value, ascending."""
        self._waiting: list[tuple[Hashes, Hashes]] = []
        """The same of values that may be there already, not in order."""
        self._waiting_values = 0

    def add(self, values: pa.Array) -> None:
        """Takes in values (N) without nulls; those that were there before change nothing."""
        hash_N = hash64(values)
        kept_N = self._kept(hash_N)
        if not kept_N.any():
            return
        hash_N, second_N = hash_N[kept_N], second_hash(values.filter(pa.array(kept_N)))
        if len(self._hash_K):  # leaves out most of what is known, so that it is not sorted again
            place_N = np.minimum(np.searchsorted(self._hash_K, hash_N), len(self._hash_K) - 1)
            new_N = (self._hash_K[place_N] != hash_N) | (self._second_K[place_N] != second_N)
            hash_N, second_N = hash_N[new_N], second_N[new_N]
        self._waiting.append((hash_N, second_N))
        self._waiting_values += len(hash_N)
        if self._waiting_values > self._most // 4:
            self._take_in()

    def _take_in(self) -> None:
        pairs = zip((self._hash_K, self._second_K), *self._waiting, strict=True)
        hash_K, second_K = (np.concatenate(parts) for parts in pairs)
        order = np.lexsort((second_K, hash_K))
        hash_K, second_K = hash_K[order], second_K[order]
        first = np.append(True, (hash_K[1:] != hash_K[:-1]) | (second_K[1:] != second_K[:-1]))
        self._hash_K, self._second_K = hash_K[first[: len(hash_K)]], second_K[first[: len(hash_K)]]
        self._waiting, self._waiting_values = [], 0
        while len(self._hash_K) > self._most:
            self._halvings += 1
            kept = int(self._kept(self._hash_K).sum())  # the first ones
            self._hash_K, self._second_K = self._hash_K[:kept], self._second_K[:kept]

    def _kept(self, hash_N: Hashes) -> NDArray[np.bool_]:
        """Returns which hashes are in the share of all whose values are kept."""
        return hash_N <= np.uint64((1 << (64 - self._halvings)) - 1)

    @property
    def hashes(self) -> int:
        """Number of hashes, of those kept, that stand for several values."""
        self._take_in()
        _, counts = np.unique(self._hash_K, return_counts=True)
        return int((counts > 1).sum())

    @property
    def share(self) -> float:
        """Share of all values that are kept."""
        return 0.5**self._halvings
