"""Retrainings in the minutes that are left: another seed is begun where there is time for all of its trainings."""

from __future__ import annotations

from collections.abc import Sequence

from search.budget.budget import Budget
from search.budget.later_stages import LaterStages
from search.execution.retraining import SPLIT, RetrainingRequest, Retrainings


class SeedBySeed:
    """Says of each retraining of a confirmation whether there is time for it (`HasTimeFor`)."""

    def __init__(
        self,
        wanted: Sequence[RetrainingRequest],
        retrainings: Retrainings,
        budget: Budget,
        later: LaterStages,
        *,
        seeds: int,
    ) -> None:
        """A confirmation whose retrainings are wanted from so many seeds, seed by seed, as many from each."""
        self._budget, self._later = budget, later
        per_seed = len(wanted) // seeds
        self._seed_of = {request.job.fingerprint: i // per_seed for i, request in enumerate(wanted)}
        self._missing = [
            retrainings.missing(wanted[first : first + per_seed], score=SPLIT)
            for first in range(0, len(wanted), per_seed)
        ]
        self._begun: set[int] = set()

    def seconds(self, seeds: int) -> float:
        """Seconds that the first so many seeds are expected to take, as far as they are not done."""
        return sum(
            self._later.retrained(request.of for request in missing) for missing in self._missing[:seeds]
        )

    def has_time_for_seeds(self, seeds: int) -> bool:
        """Whether there is time for the first so many seeds, as far as they are not done."""
        if not any(self._missing[:seeds]):
            return True
        has_time = self._budget.has_time_for(self.seconds(seeds))
        if has_time:
            self._begun |= set(range(seeds))
        return has_time

    def __call__(self, request: RetrainingRequest) -> bool:
        """Whether a retraining may begin: with its seed, or after it as long as the minutes are not over."""
        seed = self._seed_of[request.job.fingerprint]
        if seed in self._begun:
            return self._budget.has_time_for(0.0)
        self._begun.add(seed)
        return self._budget.has_time_for(self._later.retrained(r.of for r in self._missing[seed]))
