"""A model as the planner sees it: segments one after another, each with its parameters, work and memory.

Segments are what checkpointing and `fully_shard` act on: `features` (without the tables), every layer, and
`head` (what stands above the last layer; all of a model that has no layers). FSDP's units are the layers;
features and head belong to its root unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from dhen.config import ModelConfig
from dhen.model import taped_model
from dhen.schema import FeatureSchema
from dhen.tape import Device, Footprint, Shape, SplitTraffic, TapedSegment, TapeSetting, replay
from trials.cluster.machine import Precision
from trials.planner.collectives import OPERATIONS_PER_SEGMENT

ITEMSIZES: dict[Precision, int] = {"fp32": 4, "bf16": 2}


class Segment(NamedTuple):
    """One part of the model, which the planner prices by itself."""

    name: str
    parameters: int
    """Number of dense parameters (values, not bytes)."""
    flops: float
    """Forward matmul and attention FLOPs per example."""
    footprint: Footprint
    """Memory at the micro-batch and precision asked for."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of its parameters: the dimension along which `fully_shard` splits each, and all others
    together."""
    buffer_bytes: int = 0
    undeclared: tuple[str, ...] = ()
    """Kinds of its modules that declare no memory, so that a trace was taken."""
    operations: int = OPERATIONS_PER_SEGMENT
    """Number of operations of forward, as the segment declares them; an assumption if a trace was taken."""
    sent: tuple[SplitTraffic, ...] = ()
    """What ranks that split it send each other."""
    whole: tuple[str, ...] = ()
    """What each of these ranks has whole all the same, and why."""


def taped(
    model: ModelConfig, schema: FeatureSchema, precision: Precision, device: Device, tensor: int = 1
) -> tuple[TapedSegment, ...]:
    """Returns the model's segments for any batch, as a rank of `tensor` has them that split modules."""
    return tuple(taped_model(model, schema, TapeSetting(ITEMSIZES[precision], device, tensor)))


def segments_at(
    taped_segments: tuple[TapedSegment, ...], precision: Precision, batch: int
) -> tuple[Segment, ...]:
    """Returns the segments for a micro-batch of `batch` examples."""
    found = []
    for taped in taped_segments:
        declared: dict[str, Any] = {}
        if taped.undeclared is not None:
            from trials.planner.memory_counter import trace_module  # imports what only a trace needs

            footprint, shapes, buffer_bytes = trace_module(taped.undeclared, precision, batch)
            declared["undeclared"] = taped.undeclared.kinds
        else:
            tape = taped.tape
            assert tape is not None
            footprint, shapes = _replayed(tape, taped.output).at(batch), tuple(tape.parameters)
            buffer_bytes = tape.buffer_bytes
            declared |= {"operations": len(tape.operations), "sent": tuple(tape.sent)}
        parameters = sum(rows * width for rows, width in shapes)
        segment = Segment(taped.name, parameters, taped.flops, footprint, shapes, buffer_bytes, **declared)
        found.append(segment._replace(whole=taped.whole))
    return tuple(found)


_replayed = lru_cache(maxsize=4096)(replay)  # layers that are alike have one tape


def shapes_of(segments: Iterable[Segment]) -> Iterator[Shape]:
    """Yields the shapes of all parameters."""
    for segment in segments:
        yield from segment.shapes
