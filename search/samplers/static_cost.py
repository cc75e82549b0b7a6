"""What is known of a point before it trains: the network it stands for, its cost, whether a plan makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dhen.cost import dense_parameters, embedding_parameters, headline_flops, table_bytes
from dhen.errors import UserError
from dhen.fingerprint import fingerprint
from dhen.model import model_cost
from dhen.schema import FeatureSchema
from spaces.space import Candidate, Point, Space
from trials.job import TrainingConfig
from trials.serving_limits import Limits, weights_bytes

MOST_COSTS = 10_000
"""Largest number of networks whose costs are kept, since samplers price hundreds for a proposal: an assumption,
two megabytes."""


@dataclass(frozen=True, kw_only=True)
class PricedCandidate:
    """A candidate and its cost."""

    candidate: Candidate
    fingerprint: str
    """Fingerprint of the network and the training settings that the space decides; equal ones train alike."""
    flops: float
    """FLOPs of the forward pass per example."""
    parameters: int
    """Parameters of the dense part."""
    weights_bytes: int
    """Size of the exported weights."""
    table_bytes: int
    """Size of the embedding tables as training stores them."""


class CandidatePricer:
    """Prices points of one space on one log."""

    def __init__(
        self,
        space: Space,
        features: FeatureSchema,
        fits: Callable[[Candidate], bool],
        limits: Limits | None = None,
        training: TrainingConfig | None = None,
    ) -> None:
        """A pricer of a study's candidates.

        Args:
            space: the study's space.
            features: the log's inputs.
            fits: says whether some strategy makes a candidate fit (the planner takes milliseconds), in a time that
                the study has.
            limits: limits on candidates; None for no limits.
            training: training settings that all candidates share; None for the defaults.
        """
        self.space, self.fits = space, fits
        self.limits = limits or Limits()
        self._precision: str = (training or TrainingConfig()).table_precision
        self._features = features
        self._costs: dict[str, tuple[float, int, int, int]] = {}
        """Costs of the networks that were priced last, by fingerprint."""

    def price(self, point: Point) -> PricedCandidate | None:
        """The priced candidate of a point; None where the point gives no model."""
        try:
            candidate = self.space.decode(point)
        except UserError:
            return None
        model = candidate.model.to_dict()
        flops, parameters, in_tables, size = self._cost(fingerprint(model), candidate)
        return PricedCandidate(
            candidate=candidate,
            fingerprint=fingerprint([model, candidate.training]),
            flops=flops,
            parameters=parameters,
            weights_bytes=size,
            table_bytes=table_bytes(in_tables, candidate.training.get("table_precision", self._precision)),
        )

    def is_within_limits(self, priced: PricedCandidate) -> bool:
        """Whether a candidate meets the limits on sizes and FLOPs; its forward time is not yet known."""
        excess = self.limits.excess(
            flops=priced.flops, weights_bytes=priced.weights_bytes, table_bytes=priced.table_bytes
        )
        return (excess or 0.0) <= 0

    def _cost(self, key: str, candidate: Candidate) -> tuple[float, int, int, int]:
        """FLOPs, parameters of the dense part and of the tables, and bytes of weights, worked out once for a
        network: many points differ in training settings alone."""
        if key not in self._costs:
            rows = model_cost(candidate.model, self._features)
            parameters = dense_parameters(rows), embedding_parameters(rows)
            self._costs[key] = headline_flops(rows), *parameters, weights_bytes(rows)
            if len(self._costs) > MOST_COSTS:
                del self._costs[next(iter(self._costs))]
        return self._costs[key]
