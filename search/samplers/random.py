"""Random search: every axis evenly, the reference that others must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from search.samplers.context import SamplerContext


def make(seed: int, context: SamplerContext) -> BaseSampler:
    """Optuna's own random sampler."""
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)
