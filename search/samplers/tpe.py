"""Tree-structured Parzen estimator, multivariate, on two objectives (Ozaki et al., GECCO 2020)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

STARTUP_TRIALS = 8
"""Random candidates before the model is used: studies of 20 to 50 candidates are common here."""


def make(seed: int) -> BaseSampler:
    """Optuna's own; axes are modelled together, since modules, widths and learning rates interact."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS)
