"""Plans in sentences that a person can read."""

from __future__ import annotations

from trials.cluster.quantity import byte_words
from trials.planner.estimates import MemoryEstimate, PricedStrategy
from trials.planner.pricing import Pricing
from trials.strategy import Strategy

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "embedding_shards": "embedding tables",
    "unsharded_layer": "gathered parameters",
    "communication_buffers": "communication buffers",
    "input_batch": "the input batch",
    "context": "the device's context",
    "reserve": "the allocator's reserve",
}
LARGEST = 2
"""Parts named in a reason."""


def reason(strategy: Strategy, memory: MemoryEstimate, pricing: Pricing) -> str:
    """What a strategy needs, whether that fits, and what takes most."""
    there = pricing.cluster.hbm
    host, host_there = memory.host * pricing.cluster.gpus_per_host, pricing.cluster.host_memory_bytes
    needs = f"{strategy.name} needs {byte_words(memory.total)} per rank"
    most = _largest(memory)
    if memory.total > there:
        return f"{needs}, {byte_words(memory.total - there)} more than there is: {most} (in the {memory.peak_at})."
    if host > host_there:
        have = f"{byte_words(host)} of a host's memory, which has {byte_words(host_there)}"
        return f"{needs}, which fits, but {have}."
    return f"{needs} of {byte_words(there)}: {most} (in the {memory.peak_at})."


def lacking_sentence(closest: PricedStrategy, pricing: Pricing) -> str:
    """How far off everything is."""
    there, name = byte_words(pricing.cluster.hbm), closest.strategy.name
    return (
        f"Nothing fits {there} per rank: {name} comes closest and lacks {byte_words(closest.lacking_bytes)}."
    )


def faster_sentence(chosen: PricedStrategy | None, fastest: PricedStrategy | None) -> str | None:
    """Whether more techniques would be faster; None where not."""
    if chosen is None or fastest is None or fastest.time.total >= chosen.time.total:
        return None
    times = chosen.time.total / fastest.time.total
    return (
        f"{fastest.strategy.name} has more techniques and a step {times:.2f} times as fast "
        f"({1e3 * fastest.time.total:.3g} ms against {1e3 * chosen.time.total:.3g}); prefer=fastest takes it."
    )


def _largest(memory: MemoryEstimate) -> str:
    sizes = sorted(((getattr(memory, key), word) for key, word in PARTS.items()), reverse=True)
    return ", ".join(f"{byte_words(count)} are {word}" for count, word in sizes[:LARGEST] if count)
