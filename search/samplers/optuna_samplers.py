"""The samplers behind `search.samplers.SAMPLERS`: each makes one of a seed and of what is known of the study."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from search.samplers.context import SamplerContext

GP_STARTUP_TRIALS = 10
"""Number of random candidates before the model is used: the default of Optuna's `GPSampler`."""
GP_MOST_TRIALS = 200
"""Number of proposals after which TPE goes on, since the time of one grows with the cube of known candidates: an
assumption; over the first 200 a proposal took a second on average (docs/benchmarks/samplers.md, 2026-11-22, AMD
EPYC)."""
POPULATION = 20
"""Number of candidates per generation: an assumption, not measured. Optuna's default of 50 would leave short
studies with a random first generation only."""
FIRST_GENERATION = {"Nsga2:generation": 0}
"""The note that a candidate of another study needs to be a parent here."""
TPE_STARTUP_TRIALS = 8
"""Number of random candidates before the model is used: an assumption, not measured. Studies of 20 to 50
candidates are common here, and Optuna's default is 10."""


def make_gp(seed: int, context: SamplerContext) -> BaseSampler:
    """Gaussian processes on two objectives, by the logarithm of the expected hypervolume improvement.

    Optuna's own sampler; `search.samplers.successor` names the one that follows after many candidates.
    """
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed, n_startup_trials=GP_STARTUP_TRIALS)


def make_nsga2(seed: int, context: SamplerContext) -> BaseSampler:
    """NSGA-II, the usual evolutionary search on two objectives (Deb et al., 2002).

    Parents are always in the order of trials. Optuna has parents in the order of selection when it selects and in
    that of trials when it remembers, and a
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


def make_random(seed: int, context: SamplerContext) -> BaseSampler:
    """Random search: every axis evenly, the reference that others must beat."""
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def make_tpe(seed: int, context: SamplerContext) -> BaseSampler:
    """Tree-structured Parzen estimator on two objectives (Ozaki et al., GECCO 2020).

    Axes are modelled together, since modules, widths and learning rates interact.

    Candidates that are still training count as bad ones (the constant liar), so that no similar one is
    proposed beside them; with one candidate at a time there are none.
    """
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, multivariate=True, n_startup_trials=TPE_STARTUP_TRIALS, constant_liar=True)


def make_ranker(seed: int, context: SamplerContext) -> BaseSampler:
    """An ensemble of rankers trained on pairs of candidates, our own (`search.samplers.ranker`).

    A sampler of whole points; axes that a start point leaves open are those of a proposal.
    """
    from optuna.samplers import RandomSampler

    from search.samplers.ranker.propose import propose

    class Ranker(RandomSampler):
        def sample_relative(self, *_: object) -> dict[str, object]:
            return dict(context.pricer.space.for_optuna(propose(context, seed)))

    return Ranker(seed=seed)
