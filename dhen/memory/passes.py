"""The number of rows per forward pass when nothing is learnt: in evaluations, scorings and servers.

A training's plan sets it for its own evaluations (`trials.planner.pricing`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dhen.memory.replay import replay
from dhen.memory.segments import Taped

MOST_ROWS = 8192
"""Largest number of rows per forward pass: with so many, a pass's fixed costs no longer count."""
PASS_BYTES = 2**29
"""Largest number of bytes that a forward pass holds, if no plan sets its rows."""


def row_bytes(segments: Iterable[Taped]) -> int:
    """Returns the bytes per row at the peak of a forward pass through a model's segments without gradients.

    Segments with a module that declares no memory are left out.
    """
    passes = (replay(one.tape, one.output).at(1) for one in segments if one.tape is not None)
    return max((held.input + held.discarding_peak for held in passes), default=0)


def rows_at_once(model: nn.Module) -> int:
    """Returns the rows per forward pass of a model that no plan covers, by its `row_bytes`."""
    return max(1, min(MOST_ROWS, PASS_BYTES // max(1, getattr(model, "row_bytes", 0))))
