"""Gaussian processes on two objectives, by the logarithm of the expected hypervolume improvement."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from search.samplers.context import Known

STARTUP_TRIALS = 10
"""Random candidates before the model is used; Optuna's own number."""
MOST_TRIALS = 200
"""Proposals after which TPE goes on: the time of one grows with the cube of what is known
(docs/benchmarks/samplers.md)."""


def make(seed: int, known: Known) -> BaseSampler:
    """Optuna's own; `search.samplers.SUCCESSORS` says what goes on once there are many candidates."""
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
