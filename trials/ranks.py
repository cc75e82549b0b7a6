"""The place of one training process among those that train a candidate together."""

from __future__ import annotations

from typing import NamedTuple


class Ranks(NamedTuple):
    """The place of a process among hosts that are alike; ranks of a host come one after another."""

    rank: int = 0
    """Number of this process among all, from 0."""
    hosts: int = 1
    gpus_per_host: int = 1

    @property
    def world(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.gpus_per_host

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all: events, weights, sentences."""
        return self.rank == 0
