"""Gaussian processes on two objectives, by the logarithm of the expected hypervolume improvement."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from search.samplers.context import SamplerContext

STARTUP_TRIALS = 10
"""Number of random candidates before the model is used: the default of Optuna's `GPSampler`."""
MOST_TRIALS = 200
"""Number of proposals after which TPE goes on, since the time of one grows with the cube of known candidates: an
assumption; over the first 200 a proposal took a second on average (docs/benchmarks/samplers.md, 2026-11-22, AMD
EPYC)."""


def make(seed: int, context: SamplerContext) -> BaseSampler:
    """Optuna's own sampler; `search.samplers.SUCCESSORS` says what goes on once there are many candidates."""
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
