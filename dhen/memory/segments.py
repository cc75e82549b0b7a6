"""A model as segments, one after another, each with its FLOPs and its tape: what planners look at.

Segments are what checkpointing and `fully_shard` act on: `features` (without the tables), every layer, and
`head` (what stands above the last layer; all of a model that has no layers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from dhen.memory.tape import Device, Tape


class Setting(NamedTuple):
    """What a tape depends on beside the model."""

    itemsize: int
    """Bytes of a number in the precision that the dense part computes in."""
    device: Device
    ranks: int = 1
    """Number of ranks over which modules are split (`dhen.ops.split`)."""


class Undeclared(NamedTuple):
    """A segment that has no tape: what is needed to run it and look."""

    build: Callable[[], nn.Module]
    """The module; forward maps the inputs to one tensor."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of its inputs without the batch; the first needs a gradient."""
    kinds: tuple[str, ...]
    """Of the modules that declare no memory."""
    rows: int = 1
    """Of the first input, an example."""


class Taped(NamedTuple):
    """A segment."""

    name: str
    flops: float
    """Forward matmul and attention FLOPs per example."""
    tape: Tape | None
    """None where a module of it declares no memory."""
    output: int
    """Of the tape's tensors, the segment's output."""
    undeclared: Undeclared | None = None
    whole: tuple[str, ...] = ()
    """Of a segment that is split over ranks: what each of them has whole, and why."""
