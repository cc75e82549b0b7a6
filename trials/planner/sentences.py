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
"""Number of items that a reason names."""


def reason(strategy: Strategy, memory: MemoryEstimate, pricing: Pricing) -> str:
    """Says what a strategy needs, whether that fits, and what takes most."""
    available = pricing.cluster.hbm
    host, host_available = memory.host * pricing.cluster.gpus_per_host, pricing.cluster.host_memory_bytes
    needs = f"{strategy.name} needs {byte_words(memory.total)} per rank"
    most = _largest(memory)
    if memory.total > available:
        excess = byte_words(memory.total - available)
        return f"{needs}, {excess} more than there is: {most} (in the {memory.peak_at})."
    if host > host_available:
        have = f"{byte_words(host)} of a host's memory, which has {byte_words(host_available)}"
        return f"{needs}, which fits, but {have}."
    return f"{needs} of {byte_words(available)}: {most} (in the {memory.peak_at})."


def lacking_sentence(closest: PricedStrategy, pricing: Pricing) -> str:
    """Says how far off every strategy is."""
    available, name = byte_words(pricing.cluster.hbm), closest.strategy.name
    lacking = byte_words(closest.lacking_bytes)
    return f"Nothing fits {available} per rank: {name} comes closest and lacks {lacking}."


def faster_sentence(chosen: PricedStrategy | None, fastest: PricedStrategy | None) -> str | None:
    """Says that more techniques would be faster; None where they would not."""
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
