"""What is known of a point before it trains: the network it stands for, its cost, whether a plan makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dhen.cost import dense_parameters, headline_flops
from dhen.errors import UserError
from dhen.fingerprint import fingerprint
from dhen.model import model_cost
from dhen.schema import FeatureSchema
from spaces.space import Candidate, Point, Space
from trials.serving_limits import ServingConfig, weights_bytes


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


class CandidatePricer:
    """Prices points of one space on one log."""

    def __init__(
        self,
        space: Space,
        features: FeatureSchema,
        fits: Callable[[Candidate], bool],
        serving: ServingConfig | None = None,
    ) -> None:
        """A pricer; `fits` says whether some strategy makes a candidate fit (the planner takes milliseconds), in a
        time that the study has."""
        self.space, self.fits = space, fits
        self.serving = serving or ServingConfig()
        self._features = features
        self._costs: dict[str, tuple[float, int, int]] = {}

    def price(self, point: Point) -> PricedCandidate | None:
        """The priced candidate of a point; None where the point gives no model."""
        try:
            candidate = self.space.decode(point)
        except UserError:
            return None
        model = candidate.model.to_dict()
        flops, parameters, size = self._cost(fingerprint(model), candidate)
        return PricedCandidate(
            candidate=candidate,
            fingerprint=fingerprint([model, candidate.training]),
            flops=flops,
            parameters=parameters,
            weights_bytes=size,
        )

    def serves(self, priced: PricedCandidate) -> bool:
        """Whether a candidate meets the limits of serving on size and FLOPs; its forward time is not yet known."""
        excess = self.serving.excess(flops=priced.flops, weights_bytes=priced.weights_bytes)
        return (excess or 0.0) <= 0

    def _cost(self, key: str, candidate: Candidate) -> tuple[float, int, int]:
        """Cost of a network, worked out once: many points differ in training settings alone."""
        if key not in self._costs:
            rows = model_cost(candidate.model, self._features)
            self._costs[key] = headline_flops(rows), dense_parameters(rows), weights_bytes(rows)
        return self._costs[key]
