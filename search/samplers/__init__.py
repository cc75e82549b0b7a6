"""Samplers by name: what proposes the next candidate. Adding one is a function and an entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dhen.errors import unknown_name
from search.samplers.optuna_samplers import (
    GP_MOST_TRIALS,
    make_gp,
    make_nsga2,
    make_random,
    make_ranker,
    make_tpe,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

    from search.samplers.context import SamplerContext

SAMPLERS: dict[str, Callable[[int, SamplerContext], BaseSampler]] = {
    "gp": make_gp,
    "nsga2": make_nsga2,
    "random": make_random,
    "ranker": make_ranker,
    "tpe": make_tpe,
}
AUTO = "ranker"
"""The sampler that `auto` means (docs/benchmarks/samplers.md has the comparison)."""


def check_sampler(name: str) -> None:
    """Raises UserError for an unknown name, listing the names there are."""
    if name not in SAMPLERS and name != "auto":
        raise unknown_name("sampler", name, [*SAMPLERS, "auto"])


def successor(name: str, candidates: int) -> str | None:
    """The sampler that follows the named one after so many candidates; None if the named one goes on."""
    return "tpe" if name == "gp" and candidates >= GP_MOST_TRIALS else None


def make_sampler(
    name: str, seed: int, axes: Mapping[str, BaseDistribution], context: SamplerContext
) -> BaseSampler:
    """A fresh sampler, for one proposal of these axes."""
    chosen = successor(name, len(context.points)) or name
    sampler = SAMPLERS[AUTO if chosen == "auto" else chosen](seed, context)
    # every trial has every axis; Optuna would find that out by comparing those of all trials, each time
    sampler.infer_relative_search_space = lambda study, trial: dict(axes)  # type: ignore[method-assign]
    return sampler
