"""Stops a training when its time is over: after the same step on all ranks, and early enough to evaluate and keep
what was learnt."""

from __future__ import annotations

import time

from trials.checkpoint.training_state import TrainingState
from trials.collectives import as_first
from trials.ranks import Ranks

FORWARD_SHARE = 1 / 3
"""Share of a step's seconds that its forward pass takes, by which the first evaluation is expected."""
LOOK_SECONDS, MOST_STEPS = 1.0, 25
"""Seconds, and the largest number of steps, between two looks of several ranks, which agree at each."""


class TimeLimit:
    """When a training has to have ended."""

    def __init__(self, ends_at: float | None, ranks: Ranks, validation_rows: int) -> None:
        """Takes the Unix time of the end, by the first rank's clock; None for no limit. Alike on all ranks."""
        self._ends_at, self._ranks, self._validation_rows = ends_at, ranks, validation_rows
        self._next_look = 0

    def is_over(self, state: TrainingState, seconds: float) -> bool:
        """Tells, after a step, whether there is time for no more than an evaluation; the same on all ranks, a
        collective now and then. The training has taken so many `seconds`."""
        if self._ends_at is None or state.steps < self._next_look:
            return False
        step_seconds = (seconds - state.evaluate_seconds) / max(1, state.steps)
        if state.curve:
            evaluation = state.evaluate_seconds / len(state.curve)
        else:
            evaluation = (
                FORWARD_SHARE * step_seconds * self._validation_rows * state.steps / max(1, state.examples)
            )
        over = time.time() + step_seconds + evaluation > self._ends_at
        steps = 1.0 if self._ranks.world == 1 else min(MOST_STEPS, LOOK_SECONDS // max(step_seconds, 1e-9))
        over_first, steps = as_first(self._ranks, [float(over), max(1.0, steps)])
        self._next_look = state.steps + int(steps)
        return bool(over_first)
