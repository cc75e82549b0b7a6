"""Earlier studies at work in one that was started from them (`search.reuse.warm_start`).

Their candidates are told to the sampler. The front of those that are reused is proposed again, right after
the space's own start points and the lowest NE first, so that it is on this study's front too: where the very
same job was done there (seed included), its result and weights are taken over and nothing is trained; of the
others a few are trained here. What the sampler proposes later is treated alike: an equal job is taken over,
any other is trained, also where the earlier study knows the network from another seed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from search.pareto import pareto_front
from search.reuse.shared_results import copy_weights, with_result
from search.reuse.warm_start import JobOf, Reused, weights_there
from spaces.space import Point, Space
from trials.record import Outcome, TrialRecord

TRAINED_AGAIN = 4
"""Members of the earlier front that this study trains itself, at most: its budget is for what is new."""


class Earlier:
    """What one study has of earlier ones."""

    def __init__(self, reused: Reused, space: Space, job_of: JobOf) -> None:
        """`job_of` makes this study's jobs."""
        self.records = reused.records
        """For the sampler."""
        self._weights = reused.weights
        self._completed = {
            record.fingerprint: record for record in reused.records if record.outcome is Outcome.COMPLETED
        }
        self._starts: dict[str, Point] = {}
        trained = 0
        for record in reversed(pareto_front(reused.records)):
            job = job_of(space.decode(record.point)).fingerprint
            trained += job not in self._completed
            if job in self._completed or trained <= TRAINED_AGAIN:
                self._starts[job] = record.point

    def start(self, proposed: Collection[str]) -> Point:
        """Of the earlier front, the next that is not among these jobs; empty past the last."""
        return next((point for job, point in self._starts.items() if job not in proposed), {})

    def result(self, record: TrialRecord) -> TrialRecord | None:
        """The record of a trial that is about to start, with what an equal job has brought there."""
        known = self._completed.get(record.fingerprint)
        if known is None:
            return None
        taken = {"reused_from_study": known.reused_from_study, "seconds": 0.0}
        return with_result(record, known).replace(**taken)

    def fetch_weights(self, record: TrialRecord, target: Path) -> bool:
        """Copies the weights of a result from where it was trained; whether they are here now."""
        known = self._completed.get(record.fingerprint)
        if known is None or known.number not in self._weights:
            return False
        return copy_weights(weights_there(known), self._weights[known.number], target)
