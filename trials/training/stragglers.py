"""Stragglers: ranks that take much longer for their part of the steps than others with the same part.

All others wait for such a rank in every step. What is compared is each rank's own time (`own_time`), over
stretches of steps: evaluations and checkpoints, in which the first rank has more to do, are left out. A rank is
slow where it took `TIMES` the median of the others, and half of the clock itself, in `INTERVALS` intervals in a
row: ranks that share cores with other programs, and tables that cannot be cut evenly, come to less.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trials.events import SlowRank
from trials.ranks import Ranks
from trials.strategy import Strategy

INTERVAL_SECONDS = 2.0
"""Seconds of steps that are judged together, at least."""
INTERVALS = 3
"""Number of intervals in a row in which a rank must be slow."""
TIMES = 3.0
"""How many times as long as the others a slow rank takes."""
SHARE = 0.5
"""Share of the clock that a slow rank takes itself; with less, all ranks wait for the network."""
LEAST_SHARE = 0.01
"""Share of the clock that others are taken to need at least: they are measured no better."""


class Stragglers:
    """Judges the own times of all ranks, as they come."""

    def __init__(self, like: Sequence[int]) -> None:
        """`like` has a number for each rank; ranks with the same number have the same work."""
        self._like = like
        self._own = [0.0] * len(like)
        self._wall = 0.0
        self._began: int | None = None
        self._slow: dict[int, list[float]] = {}
        """How many times as long each slow rank took, in its intervals in a row."""
        self._since: dict[int, tuple[int, float]] = {}
        """Examples at which each of them began to be slow, and its seconds since."""

    def note(self, own: Sequence[float], wall: float, examples: int) -> list[SlowRank]:
        """Takes in what a stretch of steps took.

        Args:
            own: seconds that each rank took itself.
            wall: seconds by the clock.
            examples: training examples done when the stretch began.

        Returns:
            The ranks that are slow, if this stretch ends an interval that says so; one that stays slow is told
            again after as many intervals more.
        """
        if self._began is None:
            self._began = examples
        self._own = [before + more for before, more in zip(self._own, own, strict=True)]
        self._wall += wall
        if self._wall < INTERVAL_SECONDS:
            return []
        found = []
        for rank in range(len(self._like)):
            times = self._times(rank)
            if times is None:
                self._slow.pop(rank, None)
                self._since.pop(rank, None)
                continue
            since, seconds = self._since.setdefault(rank, (self._began, 0.0))
            self._since[rank] = since, seconds + self._wall
            intervals = self._slow.setdefault(rank, [])
            intervals.append(times)
            if len(intervals) % INTERVALS == 0:
                typical = statistics.median(intervals[-INTERVALS:])
                found.append(SlowRank(rank=rank, times=typical, examples=since, seconds=self._since[rank][1]))
        self._own, self._wall, self._began = [0.0] * len(self._like), 0.0, None
        return found

    def _times(self, rank: int) -> float | None:
        """Returns how many times as long as the others a rank took in this interval; None where it is not slow, or
        has no others to be compared with."""
        others = [
            own
            for other, own in enumerate(self._own)
            if other != rank and self._like[other] == self._like[rank]
        ]
        if not others or self._own[rank] < SHARE * self._wall:
            return None
        times = self._own[rank] / max(statistics.median(others), LEAST_SHARE * self._wall)
        return times if times >= TIMES else None


def like_ranks(ranks: Ranks, strategy: Strategy) -> list[int]:
    """Returns, for each rank, which others have the same work: those of its stage where there are pipelines, as
    stages differ in their layers; else all."""
    return [ranks._replace(rank=rank).stage(strategy.pipeline) for rank in range(ranks.world)]
