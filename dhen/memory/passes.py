"""How many rows go forward at once where nothing is learnt: in evaluations, scorings and servers.

A training's plan says it for its own evaluations (`trials.planner.pricing`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dhen.memory.replay import replay
from dhen.memory.segments import Taped

MOST_ROWS = 8192
"""Rows that go forward at once at most: a pass's fixed costs have vanished."""
PASS_BYTES = 2**29
"""Bytes that such a pass holds at most, where no plan says how many rows it takes."""


def row_bytes(segments: Iterable[Taped]) -> int:
    """Returns the bytes that a forward pass through a model's segments holds of each row at most, where nothing is
    saved for backward. Segments with a module that declares no memory count for nothing."""
    passes = (replay(one.tape, one.output).at(1) for one in segments if one.tape is not None)
    return max((held.input + held.discarding_peak for held in passes), default=0)


def rows_at_once(model: nn.Module) -> int:
    """Returns the rows per forward pass of a model, by its `row_bytes`, where no plan says it."""
    return max(1, min(MOST_ROWS, PASS_BYTES // max(1, getattr(model, "row_bytes", 0))))
