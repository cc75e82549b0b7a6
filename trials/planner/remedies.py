"""The nearest changes of batch, cluster or model under which one strategy would fit, where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator

from dhen.config import DhenConfig
from trials.cluster.cluster import Cluster
from trials.planner.pricing import Pricing
from trials.planner.tables.placement import PlacementError
from trials.strategy import Strategy

MOST_HOSTS = 64
"""Largest number of hosts that is tried, as a multiple of the hosts there are."""


def nearest_change(pricing: Pricing, strategy: Strategy) -> str:
    """Returns a sentence with each single change after which `strategy`, which lacks least, would fit."""
    changes_that_fit = [
        words
        for alternatives in (_batches(pricing), _hosts(pricing), _depths(pricing))
        if (words := _first_that_fits(alternatives, strategy)) is not None
    ]
    if not changes_that_fit:
        return "No smaller batch, more hosts or fewer layers alone would fit: give a rank more memory."
    return f"It would fit with {', or '.join(changes_that_fit)}."


def _first_that_fits(changes: Iterator[tuple[str, Pricing]], strategy: Strategy) -> str | None:
    for words, changed in changes:
        if not _is_on_ladder(strategy, changed):
            continue
        try:
            if changed.lacking_bytes(changed.memory(strategy)) == 0:
                return words
        except PlacementError:
            continue
    return None


def _is_on_ladder(strategy: Strategy, pricing: Pricing) -> bool:
    """Tells whether the ladder would have a strategy: a micro-batch holds an example at least, and a stage of a
    pipeline a layer."""
    model, stages = pricing.model, strategy.pipeline * strategy.chunks_per_rank
    if pricing.cluster.ranks % strategy.model_ranks:
        return False
    if strategy.pipeline > 1 and isinstance(model, DhenConfig) and stages > len(model.layers):
        return False
    return strategy.micro_batches <= pricing.examples(strategy)


def _batches(pricing: Pricing) -> Iterator[tuple[str, Pricing]]:
    """Yields the batch halved again and again."""
    batch = pricing.batch_size // 2
    while batch >= pricing.cluster.ranks:
        yield f"training.batch_size={batch}", _changed(pricing, batch_size=batch)
        batch //= 2


def _hosts(pricing: Pricing) -> Iterator[tuple[str, Pricing]]:
    """Yields one more host, then two, four ... more, where the cluster has a network."""
    cluster, more = pricing.cluster, 1
    while cluster.network and more <= MOST_HOSTS * cluster.hosts:
        hosts = cluster.hosts + more
        larger = cluster.replace(hosts=hosts)
        if pricing.batch_size >= larger.ranks:
            yield (
                f"{more} more host{'s' if more > 1 else ''} ({hosts} in all)",
                _changed(pricing, cluster=larger),
            )
        more *= 2


def _depths(pricing: Pricing) -> Iterator[tuple[str, Pricing]]:
    """Yields the model with fewer and fewer layers, taken off the end."""
    model = pricing.model
    if isinstance(model, DhenConfig):
        for depth in range(len(model.layers) - 1, 0, -1):
            shorter = model.replace(layers=model.layers[:depth])
            yield f"{depth} of {len(model.layers)} layers", _changed(pricing, model=shorter)


def _changed(
    pricing: Pricing,
    *,
    model: DhenConfig | None = None,
    cluster: Cluster | None = None,
    batch_size: int | None = None,
) -> Pricing:
    training = pricing.training
    if batch_size is not None:
        training = training.replace(batch_size=batch_size)
    return Pricing(
        model or pricing.model,
        pricing.schema,
        training,
        cluster or pricing.cluster,
        options=pricing.options,
    )
