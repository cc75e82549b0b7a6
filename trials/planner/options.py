"""PlanOptions: what a user asks of every plan, and what attempts that ran out of memory have taught."""

from __future__ import annotations

from typing import get_args

from pydantic import Field

from dhen.values import Value
from trials.strategy import Checkpointing, Prefer, Strategy

CHECKPOINTING_LEVELS = get_args(Checkpointing)
"""Kinds of activation checkpointing, those that recompute more last."""


class PlanOptions(Value):
    """What is taken into account beside the model, its batch and the cluster."""

    prefer: Prefer = "least"
    """Which of the strategies that fit is taken; `fastest` drops the number of techniques from the choice."""
    technique: Strategy | None = None
    """The strategy that the ladder is restricted to, with any number of micro-batches where it names none."""
    servers: int | None = Field(default=None, gt=0, exclude_if=lambda servers: servers is None)
    """Number of servers of embedding tables, where `training.tables.synchrony` is not local; None: the fewest that
    have room for them."""
    memory_margin: int = 0
    """Bytes that are added to every predicted peak; below 0 they are taken off."""
    learnt: dict[str, int] = Field(default_factory=dict)
    """Bytes by which predictions have been too low, by `Strategy.held_as`; they are added there besides."""
    climbing: bool = Field(default=False, exclude_if=lambda climbing: not climbing)
    """Whether an attempt under `technique` has run out of memory. The ladder then also has what holds weights and
    tables as `technique` does, and recomputes more or has more micro-batches: both change no result."""

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy is left on the ladder; a technique that names no servers allows any."""
        if self.technique is None:
            return True
        if not self.technique.servers:
            strategy = strategy.replace(servers=0, server_level="memory")
        if self.climbing:
            return self._keeps_technique(strategy)
        if self.technique.micro_batches > 1:
            return strategy == self.technique.replace(table_cache=0)
        waits = strategy.no_sync or not self.technique.no_sync
        return strategy.held_as == self.technique.held_as and waits

    def _keeps_technique(self, strategy: Strategy) -> bool:
        """Tells whether a strategy is `technique`, with more recomputation or micro-batches or without."""
        asked = self.technique
        assert asked is not None
        recomputes = CHECKPOINTING_LEVELS.index(strategy.checkpointing) >= CHECKPOINTING_LEVELS.index(
            asked.checkpointing
        )
        alike = strategy.replace(checkpointing=asked.checkpointing, micro_batches=1, no_sync=False)
        return (
            recomputes
            and alike == asked.replace(micro_batches=1, no_sync=False, table_cache=0)
            and strategy.micro_batches >= asked.micro_batches
            and (strategy.no_sync or not asked.no_sync)
        )

    def margin_bytes(self, strategy: Strategy) -> int:
        """Returns what is added to a strategy's predicted peak before it is held against the memory."""
        return self.memory_margin + self.learnt.get(strategy.held_as, 0)


DEFAULT_OPTIONS = PlanOptions()
"""The options of who asks for nothing."""
