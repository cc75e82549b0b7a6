"""What is alive at a moment of a step, and the sizes that it is made of: shared by all engines' accounts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from trials.job import TrainingConfig
from trials.planner.segments import ITEMSIZES, Segment


class Itemsizes(NamedTuple):
    """Bytes per number of the dense part, by what the number is."""

    computed: int
    """Bytes of weights as the model computes with them, of gradients and of activations: c."""
    reduced: int
    """Bytes of gradients as they are sent between ranks: r."""
    moment: int
    """Bytes of a moment in the optimizer's state."""

    @classmethod
    def of(cls, training: TrainingConfig) -> Itemsizes:
        """Returns the sizes for training settings whose precision is resolved."""
        assert training.precision != "auto"
        reduced = training.reduction_precision(training.precision)
        return cls(*(ITEMSIZES[name] for name in (training.precision, reduced, training.optimizer_precision)))


class Batch(NamedTuple):
    """A rank's input, in bytes."""

    embeddings: int
    """Embeddings that were looked up, in fp32; their gradient takes as many bytes."""
    micro_embeddings: int
    """Embeddings of one micro-batch, in fp32."""
    other: int
    """Numeric inputs and labels."""


class LiveMemory(NamedTuple):
    """What is alive at one moment beside the resident state."""

    at: str
    segment: int
    """Index of the running segment; the segments before it keep their activations."""
    activations: int
    gradients: int = 0
    unsharded: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """The bytes of all items together."""
        return total(self)


def total(moment: LiveMemory) -> int:
    """Returns the bytes of all items together."""
    return moment[2] + moment[3] + moment[4] + moment[5]


class Activations:
    """What segments hold at each moment, for one micro-batch size and one setting of checkpointing."""

    def __init__(self, segments: Sequence[Segment], recomputed: Sequence[bool]) -> None:
        footprints = [segment.footprint for segment in segments]
        # the first segment's input is the batch
        inputs = [0, *(footprint.input for footprint in footprints[1:])]
        by_segment = list(zip(footprints, inputs, recomputed, strict=True))
        self.kept = [size if again else footprint.kept for footprint, size, again in by_segment]
        self.before = [0, *accumulate(self.kept)][:-1]
        """Bytes that the segments before each segment keep."""
        self.forward, self.backward, self.backward_gradients, self.after_backward = [], [], [], []
        self.gradients_made: list[int] = []
        """Bytes when a segment's last parameter gradient has been made, beside these gradients."""
        for base, (footprint, size, again) in zip(self.before, by_segment, strict=True):
            peak, with_gradients = footprint.backward_peak, footprint.backward_peak_with_gradients
            if again:
                recomputation = size + footprint.repeated_peak
                peak = max(recomputation, footprint.recomputed_peak)
                with_gradients = max(recomputation, footprint.recomputed_peak_with_gradients)
            self.forward.append(
                base + size + (footprint.discarding_peak if again else footprint.forward_peak)
            )
            made = footprint.recomputed_gradients_made if again else footprint.gradients_made
            self.gradients_made.append(base + max(made, size))
            self.backward.append(base + peak)
            self.backward_gradients.append(with_gradients - peak)
            self.after_backward.append(base + size)  # the gradient of its input

    def by_segment(self, segments: Sequence[Segment], moment: LiveMemory) -> tuple[tuple[str, int], ...]:
        """Returns a moment's activations by the segment that they belong to."""
        running = moment.segment
        earlier = [(segments[i].name, self.kept[i]) for i in range(running)]
        return (*earlier, (segments[running].name, moment.activations - sum(size for _, size in earlier)))
