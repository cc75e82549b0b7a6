"""Where a training stands between two steps, but for weights: what a checkpoint needs to go on with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from trials.record import CurvePoint, Metrics


class TrainingState(BaseModel):
    """The state that a training carries from step to step and changes."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    examples: int = 0
    steps: int = 0
    next_evaluation: int
    """Number of examples from which on an evaluation is due."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    """Number of steps since the last evaluation whose losses were looked at."""
    clipped_steps: int = 0
    """Number of these steps whose gradients were clipped."""
    curve: list[CurvePoint] = []
    best: Metrics | None = None
    best_examples: int = 0
    """Training examples seen when the best weights were evaluated."""
    stale: int = 0
    """Number of evaluations in a row without a better NE."""
    seconds: float = 0.0
    """Seconds of training and evaluation so far, noted where a checkpoint is made."""
    evaluate_seconds: float = 0.0
    rate_factor: float = 1.0
    """Factor of the learning rates that plateaus have left."""
    speeds: list[float] = []
    """Examples per second in each stretch between evaluations."""

    def evaluations(self, every: int) -> int:
        """Returns how many evaluations, one every so many examples, lie behind; a refit has only passed them."""
        return self.next_evaluation // every - 1
