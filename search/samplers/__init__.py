"""Samplers by name: what proposes the next candidate. One file each; adding one is a file and an entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dhen.errors import unknown_name
from search.samplers import nsga2, random, tpe

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "nsga2": nsga2.make,
    "random": random.make,
    "tpe": tpe.make,
}
AUTO = "tpe"
"""What `auto` means: best hypervolume of the three on 50 to 200 candidates (docs/decisions)."""


def make_sampler(name: str, seed: int, axes: Mapping[str, BaseDistribution]) -> BaseSampler:
    """A fresh sampler of a space with these axes.

    Raises:
        UserError: listing the names there are.
    """
    name = AUTO if name == "auto" else name
    if name not in SAMPLERS:
        raise unknown_name("sampler", name, [*SAMPLERS, "auto"])
    sampler = SAMPLERS[name](seed)
    # every trial has every axis; Optuna would find that out by comparing those of all trials, each time
    sampler.infer_relative_search_space = lambda study, trial: dict(axes)  # type: ignore[method-assign]
    return sampler
