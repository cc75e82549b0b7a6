"""PlanOptions: what a user asks of every plan, and what attempts that ran out of memory have taught."""

from __future__ import annotations

from pydantic import Field

from dhen.values import Value
from trials.strategy import Prefer, Strategy


class PlanOptions(Value):
    """What is taken into account beside the model, its batch and the cluster."""

    prefer: Prefer = "least"
    """Which of the strategies that fit is taken; `fastest` drops the number of techniques from the choice."""
    technique: Strategy | None = None
    """The strategy that the ladder is restricted to, with any number of micro-batches where it names none."""
    memory_margin: int = 0
    """Bytes that are added to every predicted peak; below 0 they are taken off."""
    learnt: dict[str, int] = Field(default_factory=dict)
    """Bytes by which predictions have been too low, by `Strategy.held_as`; they are added there besides."""

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy is left on the ladder."""
        if self.technique is None:
            return True
        if self.technique.micro_batches > 1:
            return strategy == self.technique.replace(table_cache=0)
        waits = strategy.no_sync or not self.technique.no_sync
        return strategy.held_as == self.technique.held_as and waits

    def margin_bytes(self, strategy: Strategy) -> int:
        """Returns what is added to a strategy's predicted peak before it is held against the memory."""
        return self.memory_margin + self.learnt.get(strategy.held_as, 0)


DEFAULT_OPTIONS = PlanOptions()
"""The options of who asks for nothing."""
