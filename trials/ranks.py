"""The place of one training process among those that train a candidate together, and its part of things."""

from __future__ import annotations

from typing import NamedTuple


class DataPart(NamedTuple):
    """Which part of every batch a rank reads."""

    rank: int
    ranks: int
    """Number of parts."""


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

    def data_part(self, pipeline: int = 1) -> DataPart:
        """Returns which part of every batch this rank reads, where so many ranks are a pipeline: they read the
        same.

        The ranks of a stage follow one another, so that stages lie on different hosts where there are as many."""
        parts = self.world // pipeline
        return DataPart(self.rank % parts, parts)

    def stage(self, pipeline: int) -> int:
        """Returns the place of this rank in its pipeline of so many ranks."""
        return self.rank // (self.world // pipeline)


def rank_slice(size: int, rank: int, ranks: int) -> slice:
    """Returns which of `size` things in a row a rank has; the ranks' parts are equal up to one."""
    return slice(size * rank // ranks, size * (rank + 1) // ranks)
