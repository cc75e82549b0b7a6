"""What a sampler may know beside Optuna's trials: the candidates' records, and what can be said of any point."""

from __future__ import annotations

from typing import Any

from search.samplers.static_cost import CandidatePricer
from spaces.space import Point
from trials.record import TrialRecord


class SamplerContext:
    """A study as its proposals know it."""

    def __init__(self, pricer: CandidatePricer) -> None:
        """A study for which nothing was proposed so far."""
        self.pricer = pricer
        """The pricer of points."""
        self.points: dict[int, Point] = {}
        """All points that were proposed, by the trial's number."""
        self.records: dict[int, TrialRecord] = {}
        """Records of the proposed trials by number; those of running trials have what was shown so far."""
        self.fixed: Point = {}
        """Values that the next proposal has to have; the sampler chooses the rest."""
        self.kept: dict[int, Any] = {}
        """What a sampler, which is made anew for each proposal, keeps of earlier ones by their number, and could
        work out again."""

    def unfinished(self, number: int) -> bool:
        """Whether the proposal with this number has not ended."""
        return number not in self.records or self.records[number].result.outcome.unfinished
