"""Servers in sentences: why there are so many, what is pulled and pushed, and which synchrony is faster."""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from trials.cluster.quantity import byte_words
from trials.job import Synchrony, TablesConfig
from trials.planner.choice.servers_needed import fewest_servers
from trials.planner.pricing import Pricing
from trials.strategy import Strategy

MODES: tuple[Synchrony, ...] = ("sync", "semi", "async")


def servers_words(strategy: Strategy, pricing: Pricing) -> str:
    """Says what servers have, what a rank pulls and pushes, and what is hidden; nothing without servers."""
    if not strategy.servers:
        return ""
    served, found = pricing.served, pricing.servers_time(strategy)
    rest = pricing.time(strategy).total - found.total + found.hidden
    hosts, memory = pricing.cluster.hosts, byte_words(pricing.kept.rows + pricing.kept.beside)
    several = "s" if hosts > 1 else ""
    where = f"in the memory of {hosts} host{several}"
    if strategy.server_level == "ssd" and fewest_servers(pricing, "memory", 0) is None:
        where = f"do not fit in the memory of {hosts} host{several}"
    elif strategy.server_level == "ssd":
        where = "on SSDs"
    count = f"{strategy.servers} server{'s' if strategy.servers > 1 else ''}"
    on_ssd = " with SSD" if strategy.server_level == "ssd" else ""
    pulled, pushed = byte_words(int(served.pulled_bytes)), byte_words(int(served.pushed_bytes))
    sent = f"a rank pulls {pulled} and pushes {pushed} a step"
    hidden = "nothing of which is hidden"
    if found.hidden:
        hidden = f"{_ms(found.hidden)} of which are hidden behind {_ms(rest)}"
    return (
        f" Tables of {memory} {where}; {count}{on_ssd}; {sent}: {_ms(found.pull)} pull, {_ms(found.push)} push, "
        f"{hidden}."
    )


def mode_sentences(strategy: Strategy | None, pricing: Pricing) -> tuple[str, ...]:
    """Says how long a batch takes under each synchrony on these servers; nothing where ranks have tables."""
    if strategy is None or not strategy.servers:
        return ()
    seconds = {}
    for mode in MODES:
        if mode == "async" and strategy.dense != "dp":
            continue
        with suppress(ValidationError):  # another setting of the training excludes this synchrony
            seconds[mode] = seconds_per_batch(pricing, strategy, mode)
    best = min(seconds, key=lambda mode: seconds[mode])
    said = ", ".join(f"{mode} {_ms(each)}" for mode, each in seconds.items())
    return (
        f"Prediction for {strategy.name}, seconds of training for a batch by training.tables.synchrony: {said}; "
        f"{best} is the fastest. Synchrony changes what is learnt.",
    )


def seconds_per_batch(pricing: Pricing, strategy: Strategy, mode: Synchrony) -> float:
    """Returns the predicted seconds of training for a batch under a synchrony, semi with its default staleness
    unless that is what the training has."""
    if mode == pricing.training.tables.synchrony:
        other = pricing
    else:
        training = pricing.training.replace(tables=TablesConfig(synchrony=mode))
        other = Pricing(pricing.model, pricing.schema, training, pricing.cluster, options=pricing.options)
    strategy = strategy if mode != "async" else strategy.replace(checkpointing="none")
    return other.time(strategy).total / (other.cluster.ranks if other.alone else 1)


def way_out(pricing: Pricing) -> str:
    """Says, where tables fit on no rank, with how many servers they would; nothing where they would not."""
    if pricing.training.weight_average:  # which servers exclude
        return ""
    training = pricing.training.replace(tables=TablesConfig(synchrony="semi"))
    other = Pricing(pricing.model, pricing.schema, training, pricing.cluster, options=pricing.options)
    count = fewest_servers(other, "memory", 0)
    if count is not None:
        return (
            f" Or servers hold the tables (training.tables.synchrony=semi): {count} would have room for "
            "them in the memory of hosts."
        )
    if fewest_servers(other, "ssd", 0) is None:
        return ""
    hosts = pricing.cluster.hosts
    return (
        f" Or servers hold the tables on SSDs (training.tables.synchrony=semi servers={hosts}, one per host)."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
