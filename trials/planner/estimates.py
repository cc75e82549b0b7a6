"""The cost of a strategy, as values: memory of a rank, time of a step, both itemised."""

from __future__ import annotations

from typing import get_args

from pydantic import Field

from dhen.values import Value
from trials.records.strategy import Checkpointing, Prefer, Strategy


class MemoryEstimate(Value):
    """Bytes on the fullest rank at the moment of its peak."""

    parameters: int
    """Dense parameters: master weights, and the copy that the model computes with; a rank's shard if
    sharded."""
    gradients: int
    """Gradients of the dense part, as they stand at the peak."""
    optimizer_state: int
    """State of the dense part's optimizer: AdamW's two moments."""
    activations: int
    """What is saved for backward, and what the running operation holds, gradients of activations included."""
    activations_by_layer: tuple[tuple[str, int], ...]
    """Activations by segment of the model (features, layer0, ..., head); their sum is `activations`."""
    embedding_shards: int
    """Rows of embedding tables on this rank with their optimizer's state."""
    unsharded_layer: int
    """Parameters gathered for the layers in flight (shard_grad_op: for all layers)."""
    communication_buffers: int
    """Buffers of all-gather, reduce-scatter (between CPUs gloo's copies too), DDP's buckets and all-to-all: ids as
    they were received, embeddings' gradients on their way."""
    input_batch: int
    """Ids, numbers and labels of this batch and of the one fetched ahead."""
    context: int
    """Context of the device and workspaces of libraries; random bits, for rounding and on a CPU for dropout."""
    reserve: int
    """What the allocator holds beyond tensors (0 on a CPU)."""
    margin: int = 0
    """Bytes added for the verdict: what was asked for, and what attempts have needed beyond their plans; not part
    of `total`."""
    host: int
    """Bytes of the host's memory that one rank takes for offload, or of an accelerator's host for rows that it has
    pulled from servers; not part of `total`."""
    servers: int = Field(default=0, exclude_if=lambda size: not size)
    """Bytes that servers of embedding tables take of the fullest host's memory; not part of `total`."""
    peak_at: str
    """The moment of the peak: `forward of layer0`, `backward of layer3`, `optimizer step`."""

    @property
    def total(self) -> int:
        """The sum of all items that lie in the device's memory."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.activations
            + self.embedding_shards
            + self.unsharded_layer
            + self.communication_buffers
            + self.input_batch
            + self.context
            + self.reserve
        )

    @property
    def needed(self) -> int:
        """Bytes that are held against the device's memory: the predicted peak and the margin."""
        return self.total + self.margin


class StepTime(Value):
    """Seconds of one training step of the whole batch on the slowest rank."""

    forward: float
    """Dense compute of forward, by roofline; this and all other items are of all micro-batches together."""
    backward: float
    recomputation: float
    """The repeated forward of layers under activation checkpointing."""
    operations: float = Field(default=0.0, exclude_if=lambda seconds: not seconds)
    """What operations of these passes take on a CPU however small they are; a pipeline's passes have it."""
    lookup: float
    """Embedding lookup and the tables' update."""
    optimizer: float
    """Update of the dense part."""
    all_to_all: float
    """All-to-all of embeddings, forward and backward; never hidden."""
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    host_transfer: float
    """Transfers of offload over the link to the host, with the update on the host's CPU."""
    bubble: float = Field(default=0.0, exclude_if=lambda seconds: not seconds)
    """Seconds in which the busiest rank of a pipeline waits for other stages, and for what they send."""
    stage_transfer: float = Field(default=0.0, exclude_if=lambda seconds: not seconds)
    """Seconds in which embeddings reach a pipeline's first stage, and their gradients go back."""
    servers: float = Field(default=0.0, exclude_if=lambda seconds: not seconds)
    """Seconds in which rows are pulled from servers and gradients pushed, with lookups and updates there."""
    hidden: float
    """The part of the communication items (`all_to_all` to `host_transfer`, and `servers`) that goes on while the
    device computes."""
    total: float
    """The sum of all items, less what is hidden."""


class PricedStrategy(Value):
    """A strategy with its price and the verdict."""

    strategy: Strategy
    memory: MemoryEstimate
    time: StepTime
    fits: bool
    lacking_bytes: int
    """Bytes by which the strategy exceeds the memory (of the device, or of the host for offload); 0 if it
    fits."""
    reason: str
    """One sentence: what the strategy needs, why it fits or not, what takes most."""
    table_hit_rate: float | None = Field(default=None, exclude_if=lambda rate: rate is None)
    """Share of the ids looked up whose row is in the cache, if tables lie below the device."""
    batches_at_once: int = Field(default=1, exclude_if=lambda batches: batches == 1)
    """Number of batches that are trained on at once: all ranks have one of their own if they train without each
    other (`training.tables.synchrony=async`), each in the seconds of `time`."""

    @property
    def seconds_per_batch(self) -> float:
        """Seconds of training for each batch."""
        return self.time.total / self.batches_at_once


# PlanOptions: what a user asks of every plan, and what attempts that ran out of memory have taught.

CHECKPOINTING_LEVELS = get_args(Checkpointing)
"""Kinds of activation checkpointing, those that recompute more last."""


class PlanOptions(Value):
    """What is taken into account beside the model, its batch and the cluster."""

    prefer: Prefer = "least"
    """Which of the strategies that fit is taken; `fastest` drops the number of techniques from the choice."""
    technique: Strategy | None = None
    """The strategy that the ladder is restricted to, with any number of micro-batches if it names none."""
    servers: int | None = Field(default=None, gt=0, exclude_if=lambda servers: servers is None)
    """Number of servers of embedding tables, if `training.tables.synchrony` is not local; None: the fewest that
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
            return self._keeps(self.technique, strategy)
        if self.technique.micro_batches > 1:
            return strategy == self.technique.replace(table_cache=0)
        waits = strategy.no_sync or not self.technique.no_sync
        return strategy.held_as == self.technique.held_as and waits

    @staticmethod
    def _keeps(asked: Strategy, strategy: Strategy) -> bool:
        """Tells whether a strategy is the one asked for, with more recomputation or micro-batches or without."""
        level = CHECKPOINTING_LEVELS.index
        alike = strategy.replace(checkpointing=asked.checkpointing, micro_batches=1, no_sync=False)
        return (
            level(strategy.checkpointing) >= level(asked.checkpointing)
            and alike == asked.replace(micro_batches=1, no_sync=False, table_cache=0)
            and strategy.micro_batches >= asked.micro_batches
            and (strategy.no_sync or not asked.no_sync)
        )

    def margin_bytes(self, strategy: Strategy) -> int:
        """Returns what is added to a strategy's predicted peak before it is held against the memory."""
        return self.memory_margin + self.learnt.get(strategy.held_as, 0)


DEFAULT_OPTIONS = PlanOptions()
"""The options of who asks for nothing."""
