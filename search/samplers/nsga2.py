"""NSGA-II, the usual evolutionary search on two objectives (Deb et al., 2002)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from search.samplers.context import SamplerContext

POPULATION = 20
"""Number of candidates per generation: an assumption, not measured. Optuna's default of 50 would leave short
studies with a random first generation only."""

FIRST_GENERATION = {"Nsga2:generation": 0}
"""The note that a candidate of another study needs to be a parent here."""


def make(seed: int, context: SamplerContext) -> BaseSampler:
    """Optuna's own sampler, with parents always in the order of trials.

    Optuna has parents in the order of selection when it selects and in that of trials when it remembers, and a
    resumed study, which selects anew, would draw other parents.
    """
    from optuna.samplers import NSGAIISampler

    class Nsga2(NSGAIISampler):
        def before_trial(self, study: Study, trial: FrozenTrial) -> None:
            super().before_trial(study, trial)
            # of a trial whose parameters are all given Optuna asks for no generation, and it would be no parent
            self.get_trial_generation(study, trial)

        def get_parent_population(self, study: Study, generation: int) -> list[FrozenTrial]:
            parents = super().get_parent_population(study, generation)
            return sorted(parents, key=lambda trial: trial.number)

    return Nsga2(seed=seed, population_size=POPULATION)
