"""Counts the occurrences of keys that have no row yet: a count-min sketch that forgets.

Two rows of small counters, each key's in both; the least of the two is its count (Cormode and Muthukrishnan, J.
Algorithms 2005), raised conservatively: a counter rises to the count of the key that raises it and no further
(Estan and Varghese, SIGCOMM 2002). A count is never too low, so no key is admitted too late. It is too high where
both counters are another key's too: with n keys counted in W counters, with a probability of at most
(1 - e^(-n/W))^2, near 6 % where it is `crowded`, with W / 4 keys. Who counts with it halves all counters then, or
earlier, as TinyLFU does (arXiv 1512.00727); a key that occurred once is forgotten.

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
        self.keys = torch.zeros(1, dtype=torch.int64)
        """Number of keys with a count, about."""
        self._mask = width - 1

    @property
    def crowded(self) -> bool:
        """Whether counts are too high too often: it should be halved."""
        return 4 * int(self.keys) > self.counts.shape[1]

    def count(self, key_N: Tensor, times_N: Tensor) -> Tensor:
        """Counts keys, each given once with the number of its occurrences; returns their counts so far (N)."""
        places = (key_N & self._mask, ((key_N * _SECOND) >> 32) & self._mask)
        held = [row[place].to(torch.int64) for row, place in zip(self.counts, places, strict=True)]
        least_N = torch.minimum(*held)
        self.keys += (least_N == 0).sum()
        count_N = (least_N + times_N).clamp_(max=MOST)
        for row, place in zip(self.counts, places, strict=True):
            row.scatter_reduce_(0, place, count_N.to(torch.uint8), "amax")
        return count_N

    def halve(self) -> None:
        """Halves all counts."""
        self.counts >>= 1
        self.keys.copy_((self.counts[0] > 0).sum())

    def count_on(self, counts: Tensor) -> None:
        """Goes on from the counts of a filter of as many counters or more, whose places are folded onto the fewer
        that there are here."""
        self.counts.copy_(counts.view(2, -1, self._mask + 1).amax(1))
        self.keys.copy_((self.counts[0] > 0).sum())

    def clear(self) -> None:
        """Forgets all counts."""
        self.counts.zero_()
        self.keys.zero_()
