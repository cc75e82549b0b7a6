"""Where one training process stands among those that train a candidate together."""

from __future__ import annotations

from typing import NamedTuple


class Ranks(NamedTuple):
    """Hosts are alike; ranks of a host come one after another."""

    rank: int = 0
    """Of this process, from 0."""
    hosts: int = 1
    gpus_per_host: int = 1

    @property
    def world(self) -> int:
        """How many there are."""
        return self.hosts * self.gpus_per_host

    @property
    def first(self) -> bool:
        """Whether this one speaks for all: events, weights, sentences."""
        return self.rank == 0
