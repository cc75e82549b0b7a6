"""Tree-structured Parzen estimator, multivariate, on two objectives (Ozaki et al., GECCO 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from search.samplers.context import SamplerContext

STARTUP_TRIALS = 8
"""Number of random candidates before the model is used: an assumption, not measured. Studies of 20 to 50
candidates are common here, and Optuna's default is 10."""


def make(seed: int, context: SamplerContext) -> BaseSampler:
    """Optuna's own sampler; axes are modelled together, since modules, widths and learning rates interact.

    Candidates that are still training count as bad ones (the constant liar), so that no similar one is
    proposed beside them; with one candidate at a time there are none.
    """
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP_TRIALS, constant_liar=True)
