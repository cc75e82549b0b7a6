"""Learning rates from step to step: a schedule over all passes, a warm-up of the dense part's, and plateaus."""

from __future__ import annotations

import math

from trials.job import TrainingConfig


def rate_factors(
    config: TrainingConfig, examples: int, plateaus: float, total_examples: int
) -> tuple[float, float]:
    """Returns what the learning rates of the dense part and of the tables are multiplied by at the next step.

    Args:
        config: resolved.
        examples: training examples so far.
        plateaus: the factor that evaluations without a better NE have left.
        total_examples: those of all passes.
    """
    share_done = examples / total_examples
    scheduled = {
        "constant": 1.0,
        "linear": 1.0 - share_done,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * share_done),
    }
    factor = scheduled[config.schedule] * plateaus
    return factor * _warmup(config, examples, total_examples), factor


def _warmup(config: TrainingConfig, examples: int, total_examples: int) -> float:
    """Returns the warm-up's factor of the dense learning rate: a share that rises to 1 with the examples."""
    assert config.batch_size is not None
    examples_seen = examples + config.batch_size  # with this step's
    over = config.warmup_examples or config.warmup_share * total_examples
    return min(1.0, examples_seen / over) if over else 1.0
