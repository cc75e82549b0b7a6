"""A model as the planner sees it: segments one after another, each with its parameters, work and memory.

Segments are what checkpointing and `fully_shard` act on: `features` (without the tables), every layer, and
`head` (what stands above the last layer; all of a model that has no layers). FSDP's units are the layers;
features and head belong to its root unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from dhen.config import ModelConfig
from dhen.model import taped_model
from dhen.schema import FeatureSchema
from dhen.tape import Device, Footprint, Replayed, Sent, Setting, Shape, Tape, Taped, replay
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
    """Number of operations of forward, as the segment declares them; an assumption where a trace was taken."""
    sent: tuple[Sent, ...] = ()
    """What ranks that split it send each other."""
    whole: tuple[str, ...] = ()
    """What each of these ranks has whole all the same, and why."""


def segments(
    model: ModelConfig,
    schema: FeatureSchema,
    precision: Precision,
    device: Device,
    batch: int,
    tensor: int = 1,
) -> tuple[Segment, ...]:
    """Returns the model's segments for a micro-batch of `batch` examples on a device, as a rank of `tensor` has
    them that split modules."""
    return segments_at(taped(model, schema, precision, device, tensor), precision, batch)


def taped(
    model: ModelConfig, schema: FeatureSchema, precision: Precision, device: Device, tensor: int = 1
) -> tuple[Taped, ...]:
    """Returns the model's segments for any batch, as a rank of `tensor` has them that split modules."""
    return tuple(taped_model(model, schema, Setting(ITEMSIZES[precision], device, tensor)))


def segments_at(taped_segments: tuple[Taped, ...], precision: Precision, batch: int) -> tuple[Segment, ...]:
    """Returns the segments for a micro-batch of `batch` examples."""
    return tuple(_segment(taped, precision, batch) for taped in taped_segments)


def _segment(taped: Taped, precision: Precision, batch: int) -> Segment:
    if taped.undeclared is not None:
        from trials.planner.memory_counter import trace_module  # imports what only a trace needs

        traced = trace_module(taped.undeclared, precision, batch)
        return _as_segment(taped, traced.shapes, traced.buffer_bytes, traced.footprint)
    tape = taped.tape
    assert tape is not None
    footprint = _replayed(tape, taped.output).at(batch)
    segment = _as_segment(taped, tuple(tape.parameters), tape.buffer_bytes, footprint)
    return segment._replace(operations=len(tape.operations), sent=tuple(tape.sent))


def _as_segment(taped: Taped, shapes: tuple[Shape, ...], buffer_bytes: int, footprint: Footprint) -> Segment:
    return Segment(
        name=taped.name,
        parameters=sum(rows * width for rows, width in shapes),
        flops=taped.flops,
        footprint=footprint,
        shapes=shapes,
        buffer_bytes=buffer_bytes,
        undeclared=taped.undeclared.kinds if taped.undeclared else (),
        whole=taped.whole,
    )


@lru_cache(maxsize=4096)
def _replayed(tape: Tape, output: int) -> Replayed:
    """Returns the tape replayed; layers that are alike have one tape."""
    return replay(tape, output)


def shapes_of(segments: Iterable[Segment]) -> Iterator[Shape]:
    """Yields the shapes of all parameters."""
    for segment in segments:
        yield from segment.shapes
