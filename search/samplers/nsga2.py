"""NSGA-II, the usual evolutionary search on two objectives (Deb et al., 2002)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

POPULATION = 20
"""Candidates a generation; Optuna's 50 would leave short studies with a random first generation only."""


def make(seed: int) -> BaseSampler:
    """Optuna's own."""
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(seed=seed, population_size=POPULATION)
