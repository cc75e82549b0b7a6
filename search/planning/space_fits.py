"""Whether anything in a space fits a cluster and the limit on table bytes, and what the nearest candidate lacks
where nothing does."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from dashboards.names import short_name
from dashboards.units import byte_size
from dhen.errors import UserError
from search.samplers.draw import MOST_OVER, DrawnPoint, evenly
from search.samplers.static_cost import CandidatePricer, PricedCandidate
from spaces.space import Candidate
from trials.cluster.cluster import Cluster
from trials.cluster.quantity import byte_words
from trials.planner.plan import Plan

DRAWN = 200
"""Number of drawn candidates of which one must fit: many more than a study tries by training them."""
MIB = 2**20


class UnfitCandidate(NamedTuple):
    """A candidate that does not fit."""

    drawn: DrawnPoint
    plan: Plan

    def nearer(self, other: UnfitCandidate | None) -> UnfitCandidate:
        """The candidate that lacks less memory."""
        return other if other is not None and other.plan.lacking_bytes <= self.plan.lacking_bytes else self


def check_some_fit(pricer: CandidatePricer, cluster: Cluster, plan: Callable[[Candidate], Plan]) -> None:
    """Draws candidates of the space of `pricer` until one fits.

    Raises:
        UserError: where none does, naming the nearest and what would help; or why none could be planned.
    """
    nearest: UnfitCandidate | None = None
    trouble: UserError | None = None
    for drawn in islice(evenly(pricer, set(), random.Random(0), {}), DRAWN):
        try:
            candidate_plan = plan(drawn.priced.candidate)
        except UserError as error:  # a batch smaller than the ranks: this candidate alone is infeasible
            trouble = error
            continue
        if candidate_plan.chosen is not None:
            return
        nearest = UnfitCandidate(drawn, candidate_plan).nearer(nearest)
    if nearest is not None:
        raise too_little_memory(pricer.space.name, "nothing fits", cluster, DRAWN, nearest)
    if trouble is not None:
        raise trouble


def check_some_tables_fit(pricer: CandidatePricer) -> None:
    """Draws candidates of the space of `pricer` until the embedding tables of one are within the study's limit.

    Raises:
        UserError: where none are, naming the smallest.
    """
    limit, rng = pricer.limits.max_table_bytes, random.Random(0)
    if limit is None:
        return
    smallest: PricedCandidate | None = None
    for _ in range(MOST_OVER):
        priced = pricer.price(pricer.space.random_point(rng))
        if priced is None:
            continue
        if priced.table_bytes <= limit:
            return
        if smallest is None or priced.table_bytes < smallest.table_bytes:
            smallest = priced
    if smallest is not None:
        raise UserError(
            f"space {pricer.space.name!r}: no candidate has embedding tables within max_table_bytes="
            f"{byte_words(limit)}, among {MOST_OVER} drawn. The smallest are those of "
            f"{short_name(smallest.candidate.model.to_dict())}, and would be with max_table_bytes="
            f"{smallest.table_bytes}. Shorter embeddings (embedding_dim, table_dim_exponent), a smaller "
            "growing.capacity or training.table_precision=fp16 make tables smaller."
        )


def too_little_memory(
    space: str, fit: str, cluster: Cluster, drawn: int, nearest: UnfitCandidate
) -> UserError:
    """An error with the nearest candidate and its need; `fit` says how many of the drawn candidates fit."""
    plan, model = nearest.plan, nearest.drawn.priced.candidate.model
    needed = -(-(plan.hbm + plan.lacking_bytes) // MIB)
    return UserError(
        f"space {space!r}: {fit} {byte_size(plan.hbm)} per rank of cluster {cluster.name!r}, among {drawn} "
        f"candidates drawn at most. The nearest that does not is {short_name(model.to_dict())}, and would with "
        f"hbm={needed}MiB. {plan.remedy}"
    )
