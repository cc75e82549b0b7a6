"""What a strategy costs, as values: memory of a rank, time of a step, both itemised."""

from __future__ import annotations

from dhen.values import Value
from trials.strategy import Strategy


class MemoryEstimate(Value):
    """Bytes on the fullest rank at the moment of its peak."""

    parameters: int
    """Dense: master weights, and the copy the model computes with; a rank's shard where sharded."""
    gradients: int
    """Dense, as they stand at the peak."""
    optimizer_state: int
    """Dense: AdamW's two moments."""
    activations: int
    """Saved for backward, and what the running operation holds, gradients of activations included."""
    activations_by_layer: tuple[tuple[str, int], ...]
    """The same by segment of the model (features, layer0, ..., head); sums to `activations`."""
    embedding_shards: int
    """Rows of embedding tables on this rank with their optimizer's state."""
    unsharded_layer: int
    """Parameters gathered for the layers in flight (ZeRO-2: for all layers)."""
    communication_buffers: int
    """Of all-gather, reduce-scatter, DDP's buckets and all-to-all."""
    input_batch: int
    """Ids, numbers and labels, this batch and the one fetched ahead."""
    context: int
    """Context of the device and workspaces of libraries; random bits, for rounding and on a CPU for dropout."""
    reserve: int
    """What the allocator holds beyond tensors (0 on a CPU), and the margin that was asked for."""
    host: int
    """Of the host's memory, by one rank, for offload; not part of `total`."""
    peak_at: str
    """The moment of the peak: `forward of layer0`, `backward of layer3`, `optimizer step`."""

    @property
    def total(self) -> int:
        """All of the device's memory that is needed."""
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


class StepTime(Value):
    """Seconds of one training step of the whole batch on the slowest rank."""

    forward: float
    """Dense compute, by roofline; all micro-batches together, as below."""
    backward: float
    recomputation: float
    """Forward again, for checkpointing."""
    lookup: float
    """Embedding lookup and the tables' update."""
    optimizer: float
    """Update of the dense part."""
    all_to_all: float
    """Of embeddings, forward and backward; never hidden."""
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    host_transfer: float
    """Offload: over the link to the host, with the update on the host's CPU."""
    hidden: float
    """The part of the five lines above that goes on while the device computes."""
    total: float
    """Everything above, less what is hidden."""


class PricedStrategy(Value):
    """A strategy with its price and the verdict."""

    strategy: Strategy
    memory: MemoryEstimate
    time: StepTime
    fits: bool
    lacking_bytes: int
    """What it exceeds the memory by (of the device, or of the host for offload); 0 where it fits."""
    reason: str
    """One sentence: what it needs, why it fits or not, what takes most."""
