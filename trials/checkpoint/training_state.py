"""Where a training stands between two steps, but for weights: what a checkpoint needs to go on with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from trials.record import CurvePoint, Metrics


class TrainingState(BaseModel):
    """Carried from step to step, and changed by it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")

    examples: int = 0
    steps: int = 0
    next_evaluation: int
    """The number of examples from which on one is due."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    """Of the steps since the last evaluation whose losses were looked at."""
    curve: list[CurvePoint] = []
    best: Metrics | None = None
    best_examples: int = 0
    """When that was."""
    stale: int = 0
    """Evaluations in a row without a better NE."""
    seconds: float = 0.0
    """Of training and evaluation so far, noted where a checkpoint is made."""
    evaluate_seconds: float = 0.0
    rate_factor: float = 1.0
    """What plateaus have left of the learning rates."""
    speeds: list[float] = []
    """Examples per second in each stretch between evaluations."""
