"""A model as segments, one after another, each with its FLOPs and its tape: what planners look at.

Segments are what checkpointing and `fully_shard` act on: `features` (without the tables), every layer, and
`head` (what stands above the last layer; all of a model that has no layers).
"""

from __future__ import annotations

from typing import NamedTuple

from dhen.tape import Device, Tape


class Setting(NamedTuple):
    """What a tape depends on beside the model."""

    itemsize: int
    """Bytes of a number in the precision that the dense part computes in."""
    device: Device


class Taped(NamedTuple):
    """A segment."""

    name: str
    flops: float
    """Forward matmul and attention FLOPs an example."""
    tape: Tape
    output: int
    """Of the tape's tensors, the segment's output."""
