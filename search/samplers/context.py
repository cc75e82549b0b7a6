"""What a sampler may know beside Optuna's trials: the candidates' records, and what can be said of any point."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dhen.cost import dense_parameters, embedding_parameters, headline_flops, table_bytes
from dhen.errors import UserError
from dhen.model import model_cost
from dhen.schema import FeatureSchema
from dhen.values import fingerprint
from search.selection import log_flops
from spaces.axes import Axis, RangeAxis, Scalar, random_value
from spaces.space import Candidate, Point, Space
from trials.records.job import TrainingConfig
from trials.records.serving_limits import Limits, weights_bytes
from trials.records.trial_record import TrialRecord

# What is known of a point before it trains: the network it stands for, its cost, whether a plan makes it fit.

MOST_COSTS = 10_000
"""Largest number of networks whose costs are kept, since samplers price hundreds for a proposal: an assumption,
two megabytes."""


@dataclass(frozen=True, kw_only=True)
class PricedCandidate:
    """A point, its candidate and what is known of it without training."""

    point: Point
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

    @property
    def log_flops(self) -> float:
        """Log FLOPs of the candidate, the front's first axis."""
        return log_flops(self.flops)


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
        """The priced candidate of a point; None if the point gives no model."""
        try:
            candidate = self.space.decode(point)
        except UserError:
            return None
        model = candidate.model.to_dict()
        flops, parameters, in_tables, size = self._cost(fingerprint(model), candidate)
        return PricedCandidate(
            point=point,
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


# Points that may be proposed: new ones, from the whole space and near good candidates.

TRIES = 50
"""Number of known points in a row after which there seems to be nothing new to draw, since a space may be small:
an assumption, not measured."""
MOST_OVER = 1000
"""Number of drawn points over a limit of serving or of table bytes after which no more are drawn, since limits may
leave little: an assumption, not measured."""
MOST_CHANGED = 4
"""Largest number of axes in which a point near another differs from it: an assumption, not measured."""
STEP = 0.15
"""Standard deviation of a change of a number, over its range: an assumption, not measured."""


def evenly(
    pricer: CandidatePricer, taken: set[str], rng: random.Random, fixed: Point
) -> Iterator[PricedCandidate]:
    """New points from the whole space with the values of `fixed`; their fingerprints join `taken` as they come."""
    return _new(pricer, lambda: pricer.space.random_point(rng) | fixed, taken)


def near(
    pricer: CandidatePricer, good: Sequence[Point], taken: set[str], rng: random.Random, fixed: Point
) -> Iterator[PricedCandidate]:
    """New points with the values of `fixed` that differ from a good point in a few other axes."""
    return _new(pricer, lambda: neighbour(pricer.space, rng.choice(good) | fixed, rng, fixed), taken)


def neighbour(space: Space, point: Point, rng: random.Random, fixed: Point) -> Point:
    """The point with some axes changed that are not fixed: choices drawn anew, numbers moved a little."""
    free = [axis for axis in space.axes if axis.name not in fixed]
    if not free:
        return point
    count = rng.randint(1, min(MOST_CHANGED, len(free)))
    changed = rng.sample(free, count)
    return point | {axis.name: _moved(axis, point[axis.name], rng) for axis in changed}


def _new(pricer: CandidatePricer, draw: Callable[[], Point], taken: set[str]) -> Iterator[PricedCandidate]:
    fruitless = over = 0
    while fruitless < TRIES and over < MOST_OVER:
        point = draw()
        priced = pricer.price(point)
        if priced is not None and not pricer.is_within_limits(priced):
            over += 1
            continue
        fruitless += 1
        if priced is not None and priced.fingerprint not in taken:
            taken.add(priced.fingerprint)
            fruitless = 0
            yield priced


def _moved(axis: Axis, value: Scalar, rng: random.Random) -> Scalar:
    if not isinstance(axis, RangeAxis) or axis.whole:
        return random_value(axis, rng)
    assert isinstance(value, (int, float))
    if axis.log:
        span = math.log(axis.high / axis.low)
        moved = value * math.exp(rng.gauss(0.0, STEP * span))
    else:
        moved = value + rng.gauss(0.0, STEP * (axis.high - axis.low))
    return min(max(moved, axis.low), axis.high)
