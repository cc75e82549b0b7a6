"""A model at other depths, priced at each: its last layer repeated, or its last layers left out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dhen.config import DhenConfig, ModelConfig
from dhen.errors import UserError
from search.plan_request import PlanRequest, for_cluster
from trials.cluster.cluster import Cluster
from trials.planner.estimates import PricedStrategy
from trials.planner.options import PlanOptions
from trials.planner.plan import plan

DEPTHS = re.compile(r"depth=([0-9]+)\.\.([0-9]+)")
DEEPEST = 1000


def depths(text: str) -> range:
    """The depths of `depth=1..40`, both ends included.

    Raises:
        UserError: for anything else.
    """
    match = DEPTHS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= DEEPEST:
        raise UserError(
            f"--sweep {text!r}: expected depth=FIRST..LAST from 1 to {DEEPEST}, such as depth=1..40."
        )
    return range(first, last + 1)


def at_depth(model: ModelConfig, depth: int) -> DhenConfig:
    """The model with so many layers.

    Raises:
        UserError: for a family without layers.
    """
    if not isinstance(model, DhenConfig):
        raise UserError(f"--sweep: a model of the family {model.family!r} has no layers; give a dhen model.")
    layers = model.layers[:depth]
    return model.replace(layers=layers + layers[-1:] * (depth - len(layers)))


def sweep(
    request: PlanRequest, cluster: Cluster, depths: Iterable[int], options: PlanOptions
) -> dict[int, tuple[PricedStrategy, ...]]:
    """The priced ladder by depth.

    Raises:
        UserError: see `at_depth` and `trials.planner.plan.plan`.
    """
    training = for_cluster(request.training, cluster)
    return {
        depth: tuple(
            plan(
                at_depth(request.model, depth), request.schema, training, cluster, options=options
            ).strategies
        )
        for depth in depths
    }
