"""Counts the occurrences of keys that have no row yet: a count-min sketch that forgets.

Two rows of small counters, each key's in both; the least of the two is its count (Cormode and Muthukrishnan, J.
Algorithms 2005), raised conservatively: a counter rises to the count of the key that raises it and no further
(Estan and Varghese, SIGCOMM 2002). A count is never too low, so no key is admitted too late. It is too high where
both counters are another key's too: with n keys counted in W counters, with a probability of at most
(1 - e^(-n/W))^2. All counters are halved after W / 4 occurrences (as TinyLFU's, arXiv 1512.00727), which keeps it
near 6 % at most; in between, a key that occurs less often than that is forgotten.

Shapes: N keys, W counters of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS_PER_ROW = 8
"""Counters of each row of the sketch for each row of the tables."""
MOST = 255
"""Largest count, of one byte."""
_SECOND = 0x6C62272E07BB0142
"""An odd constant that the second row's places are multiplied with."""


class AdmissionFilter:
    """The counts of keys, by how often they occurred of late."""

    def __init__(self, rows: int) -> None:
        """`rows` is the number of rows of the tables that keys wait for."""
        width = 1 << (COUNTERS_PER_ROW * rows - 1).bit_length()
        self.counts = torch.zeros(2, width, dtype=torch.uint8)
        self.occurrences = torch.zeros(1, dtype=torch.int64)
        """Occurrences counted since all counters were halved."""
        self._mask = width - 1

    def count(self, key_N: Tensor, times_N: Tensor) -> Tensor:
        """Counts keys, each given once with the number of its occurrences; returns their counts so far (N)."""
        if 4 * int(self.occurrences) > self.counts.shape[1]:
            self.counts >>= 1
            self.occurrences.zero_()
        self.occurrences += int(times_N.sum())
        places = (key_N & self._mask, ((key_N * _SECOND) >> 32) & self._mask)
        held = [row[place].to(torch.int64) for row, place in zip(self.counts, places, strict=True)]
        count_N = (torch.minimum(*held) + times_N).clamp_(max=MOST)
        for row, place in zip(self.counts, places, strict=True):
            row.scatter_reduce_(0, place, count_N.to(torch.uint8), "amax")
        return count_N

    def clear(self) -> None:
        """Forgets all counts."""
        self.counts.zero_()
        self.occurrences.zero_()
